"""What the two experiments with ResNet18 share: configurations, the dense model, and one pruning run."""

"""Networks and data too large for the library: ResNets with CIFAR-10 and Tiny-ImageNet, MiniLM with STS-B."""

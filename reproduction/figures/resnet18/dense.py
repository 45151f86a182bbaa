"""The data of the ResNet18 experiments and the dense model that all of them start from."""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.formats.files import write_atomically
from fishleg.workloads.digits import Batches, split_digits
from reproduction.figures.resnet18.config import Config
from reproduction.harness import Progress, Results, UnitLocks, duration
from reproduction.workloads.archives import CIFAR10, TINY_IMAGENET, fetch
from reproduction.workloads.datasets import accuracy, cifar10, data_directory, tiny_imagenet
from reproduction.workloads.networks import ResNet18


@dataclass(frozen=True)
class Data:
    """uint8 images and labels, on the CPU."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def test_accuracy(self, model: nn.Module, device: str) -> float:
        """Per cent of the test images that are classified correctly."""
        return accuracy(model, self.test_images, self.test_labels, device)

    def check(self, config: Config) -> None:
        """Raise if the number of classes is not that of the configuration."""
        expected = config.classes if isinstance(config.classes, int) else len(config.classes)
        if self.classes != expected:
            raise ValueError(f"{config.dataset} has {self.classes} classes here, expected {expected}")

    def batches(self, config: Config, seed: int) -> Batches:
        """Shuffled batches with flips and crops; not for digits, since a flipped digit is another one."""
        size = min(config.batch_size, len(self.images))
        augmented = config.dataset != "digits"
        return Batches(self.images, self.labels, size, seed=seed, augmented=augmented)


def load_data(config: Config, directory: Path | None, progress: Progress, *, download: bool = False) -> Data:
    """The dataset of the configuration; `download` fetches it if it is not there."""
    archive = TINY_IMAGENET if config.dataset == "tiny-imagenet" else CIFAR10
    try:
        examples = _read(config, directory, progress)
    except FileNotFoundError:
        target = data_directory(directory) / archive.directory
        if not download or target.exists():
            raise
        fetch(archive, data_directory(directory), progress)
        examples = _read(config, directory, progress)
    examples.check(config)
    return examples


def _read(config: Config, directory: Path | None, progress: Progress) -> Data:
    if config.dataset == "digits":
        images, labels, test_images, test_labels = split_digits()
        big = [(x * 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous() for x in (images, test_images)]
        return Data(big[0], labels, big[1], test_labels)
    if config.dataset == "cifar10":
        return Data(*cifar10("train", directory), *cifar10("test", directory))
    test = tiny_imagenet("test", directory, config.classes)
    progress(f"reading {config.dataset}, about 1000 pictures a second")
    return Data(*tiny_imagenet("train", directory, config.classes), *test)


def new_model(config: Config, classes: int) -> nn.Module:
    """An untrained network, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet18(classes, config.width, config.stem_stride)
    return model.to(config.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def dense_path(config: Config, out: Path) -> Path:
    """Where the dense model of these settings is kept."""
    text = json.dumps(config.dense_settings(), sort_keys=True)
    return out / f"dense-{config.dataset}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.pt"


def _read_dense(path: Path, device: str) -> dict[str, Any] | None:
    """The state of a finished or stopped training."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        if not {"model", "curve"} <= state.keys():
            raise ValueError("it has no model and curve")
    except Exception as error:  # torch raises many kinds of errors for damaged files
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): remove it, and the dense model is "
                         "trained anew") from error  # fmt: skip
    return state


def epochs_to_train(config: Config, out: Path) -> int:
    """The epochs of the dense model that are still to be trained."""
    state = _read_dense(dense_path(config, out), "cpu")
    return config.dense_epochs - (len(state["curve"]) if state else 0)


class Dense:
    """The dense model: trained with Adam once, kept beside the results, and shared by all pruning runs."""

    def __init__(self, config: Config, examples: Data, out: Path, progress: Progress) -> None:
        self.config, self.examples, self.progress = config, examples, progress
        self.path = dense_path(config, out)

    def model(self) -> nn.Module:
        """A fresh copy of the trained model."""
        state = self._trained()
        model = new_model(self.config, self.examples.classes)
        model.load_state_dict(state["model"])
        return model.eval()

    def record(self) -> Results:
        """Training loss and test accuracy after each epoch, and a hash that identifies the model."""
        state = self._trained()
        return {"curve": list(state["curve"]), "weights": _digest(state["model"])}

    def _trained(self) -> dict[str, Any]:
        """The state from the file, trained first if necessary, by one process at a time."""
        state = _read_dense(self.path, self.config.device)
        if state is not None and len(state["curve"]) == self.config.dense_epochs:
            return state
        with UnitLocks(self.path) as locks:
            locks.take("dense", wait=True)
            return self._train(_read_dense(self.path, self.config.device))

    def _train(self, state: dict[str, Any] | None) -> dict[str, Any]:
        config = self.config
        model = new_model(config, self.examples.classes)
        batches = self.examples.batches(config, seed=1000)
        optimizer = torch.optim.Adam(model.parameters(), lr=config.dense_lr)
        steps = config.dense_epochs * len(batches)
        rate = _one_cycle if config.dense_rate == "one cycle" else _constant
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / steps))
        curve: list[dict[str, float]] = []
        if state is not None:  # a run that was stopped goes on with its next epoch
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            curve = state["curve"]
        for epoch in range(len(curve), config.dense_epochs):
            start, cpu = time.perf_counter(), time.process_time()
            batches.set_epoch(epoch)
            loss = _train_epoch(model, batches, optimizer, schedule, config.device)
            accuracy = self.examples.test_accuracy(model, config.device)
            curve.append({"loss": loss, "accuracy": accuracy, "cpu_seconds": time.process_time() - cpu})
            left = (time.perf_counter() - start) * (config.dense_epochs - epoch - 1)
            self.progress(
                f"dense model, epoch {epoch + 1} of {config.dense_epochs}: loss {loss:.3f}, "
                f"{accuracy:.2f} %, about {duration(left)} left"
            )
            state = {
                "model": model.state_dict(), "curve": curve,
                "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
            }  # fmt: skip
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_atomically(self.path, buffer.getvalue())
        assert state is not None
        return state


def _digest(state: dict[str, Tensor]) -> str:
    """A hash of the weights."""
    found = hashlib.sha256()
    for value in state.values():
        found.update(value.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _one_cycle(share: float) -> float:
    """Up linearly over the first fifth, then down to zero along a half cosine: it ends on a plateau."""
    return share / 0.2 if share < 0.2 else 0.5 * (1 + math.cos(math.pi * (share - 0.2) / 0.8))


def _constant(share: float) -> float:
    return 1.0


def _train_epoch(model: nn.Module, batches: Batches, optimizer: Any, schedule: Any, device: str) -> float:
    model.train()
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())

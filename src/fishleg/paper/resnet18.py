"""What the two experiments with ResNet18 share: data, the dense model, scorers × optimizers, one run."""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.checkpoint import write_atomically
from fishleg.loop import gradual
from fishleg.paper.config import Config, load
from fishleg.paper.harness import (
    Progress,
    Results,
    Unit,
    duration,
    finish,
    missing,
    need_matplotlib,
    run_units,
    save_picture,
)
from fishleg.paper.jobs import Claims, run_workers
from fishleg.surgeon import PruneStep, Surgeon
from fishleg.tuning import FineTuning
from fishleg.warmstart import AuxiliaryOptions
from fishleg.workloads import data
from fishleg.workloads.archives import CIFAR10, TINY_IMAGENET, fetch
from fishleg.workloads.models import ResNet18

SGD_RATE = {"ours": 0.05, "paper": 1e-3}
# of an arm, in epochs of SGD for each of its epochs: what the estimate of the time left goes by
COST = {
    "magnitude + SGD": 1.0,
    "magnitude + FishLeg": 1.4,
    "OBS + SGD": 1.6,
    "FLS + SGD": 2.2,
    "FLS + FishLeg": 2.4,
}


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

    def check(self, config: Config) -> None:
        """The classes are as many as the configuration says."""
        expected = config.classes if isinstance(config.classes, int) else len(config.classes)
        if self.classes != expected:
            raise ValueError(f"{config.dataset} has {self.classes} classes here, expected {expected}")

    def batches(self, config: Config, seed: int) -> data.Batches:
        """Shuffled batches with flips and crops; digits are not flipped about, they would be others."""
        size = min(config.batch_size, len(self.images))
        augmented = config.dataset != "digits"
        return data.Batches(self.images, self.labels, size, seed=seed, augmented=augmented)


def load_data(config: Config, directory: Path | None, progress: Progress, *, download: bool = False) -> Data:
    """The dataset of the configuration, downloaded first where that is asked for and nothing is there."""
    archive = TINY_IMAGENET if config.dataset == "tiny-imagenet" else CIFAR10
    try:
        examples = _read(config, directory, progress)
    except FileNotFoundError:
        target = data.data_directory(directory) / archive.directory
        if not download or target.exists():
            raise
        fetch(archive, data.data_directory(directory), progress)
        examples = _read(config, directory, progress)
    examples.check(config)
    return examples


def _read(config: Config, directory: Path | None, progress: Progress) -> Data:
    if config.dataset == "digits":
        images, labels, test_images, test_labels = data.split_digits()
        big = [(x * 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous() for x in (images, test_images)]
        return Data(big[0], labels, big[1], test_labels)
    if config.dataset == "cifar10":
        return Data(*data.cifar10("train", directory), *data.cifar10("test", directory))
    test = data.tiny_imagenet("test", directory, config.classes)
    progress(f"reading {config.dataset}, some 1000 pictures a second")
    return Data(*data.tiny_imagenet("train", directory, config.classes), *test)


@torch.no_grad()
def test_accuracy(model: nn.Module, examples: Data, device: str) -> float:
    """Per cent of the test images that are classified rightly."""
    model.eval()
    right = 0
    for images, labels in zip(examples.test_images.split(500), examples.test_labels.split(500), strict=True):
        right += int((model(data.normalize(images.to(device))).argmax(1) == labels.to(device)).sum())
    return 100 * right / len(examples.test_labels)


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
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def epochs_to_train(config: Config, out: Path) -> int:
    """What is left of the dense model's training: nothing once its file is whole."""
    state = _read_dense(dense_path(config, out), "cpu")
    return config.dense_epochs - (len(state["curve"]) if state else 0)


class Dense:
    """The dense model: trained with Adam once, kept beside the results, and shared by all that prune it."""

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
        """Training loss and test accuracy after each epoch, and what tells this model from another."""
        state = self._trained()
        return {"curve": list(state["curve"]), "weights": _digest(state["model"])}

    def _trained(self) -> dict[str, Any]:
        """From the file if it is there; two processes, of other experiments maybe, do not both train it."""
        state = _read_dense(self.path, self.config.device)
        if state is not None and len(state["curve"]) == self.config.dense_epochs:
            return state
        with Claims(self.path) as claims:
            claims.take("dense", wait=True)
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
            accuracy = test_accuracy(model, self.examples, config.device)
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
    """A name for these weights."""
    found = hashlib.sha256()
    for value in state.values():
        found.update(value.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _one_cycle(share: float) -> float:
    """Up linearly over the first fifth, then down to zero along a half cosine: it ends on a plateau."""
    return share / 0.2 if share < 0.2 else 0.5 * (1 + math.cos(math.pi * (share - 0.2) / 0.8))


def _constant(share: float) -> float:
    return 1.0


def _train_epoch(
    model: nn.Module, batches: data.Batches, optimizer: Any, schedule: Any, device: str
) -> float:
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


def arm_options(config: Config, arm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the Surgeon and of the fine-tuning for "scorer + optimizer", as the preset has them."""
    scorer, _, optimizer = arm.partition(" + ")
    scorers: dict[str, dict[str, Any]] = {
        "magnitude": {"method": "magnitude", "compensation": "none"},
        # oBERT's: empirical Fisher, blocks of 50, single updates added up; damping and floor are ours
        "OBS": {"method": "obert", "compensation": "sum", "empirical": True, "samples": config.obs_samples},
        "FLS": {"samples": config.samples},
    }
    surgery = scorers[scorer]
    tuning: dict[str, Any] = {"optimizer": "sgd", "lr": SGD_RATE[config.preset], "refine": config.refine}
    if optimizer == "FishLeg":
        tuning = {"optimizer": "fishleg", "refine": config.refine}
        if config.preset == "paper":
            paper, tuning = paper_preset(config)
            surgery = {**paper, **surgery} if scorer == "magnitude" else {**surgery, **paper}
    if config.preset == "paper":
        tuning["lr_schedule"] = "constant"
    return surgery, {"epochs": config.epochs, **tuning}


def paper_preset(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The paper's table of hyperparameters: η, α, η_aux, β, γ, scale, warmup.

    α is taken to be weight decay, "scale" the multiple of I at which Q starts, and "warmup" the auxiliary
    steps before the first pruning (η_aux falls to zero in these, as everywhere in this library). One
    auxiliary step goes with every training step, as in Algorithm 1. The authors' optimizer averages what it
    steps along, m ← βm + (1−β)Qg, and this one adds it up: hence η(1−β), and α/(1−β). The rest is as in the
    text: Q = D(LLᵀ⊗RRᵀ)D, isotropic probes with exact products, P = Q, OBS's updates of single weights.
    """
    tiny, beta = config.dataset == "tiny-imagenet", 0.9
    auxiliary = AuxiliaryOptions(
        estimator="probe", lr=1e-6 if tiny else 1e-5, betas=(0.9, 0.999), precondition=True
    )
    surgery = {
        "gamma": 1.0 if tiny else 1e-3, "scale": 1.0 if tiny else 10.0, "structure": "scaled-kronecker",
        "samples": 100, "sub_batch": config.batch_size, "auxiliary": auxiliary, "compensation": "sum",
        "batch_statistics": False,
    }  # fmt: skip
    tuning = {
        "optimizer": "fishleg", "lr": (1e-2 if tiny else 1e-3) * (1 - beta), "momentum": beta,
        "weight_decay": 1e-5 / (1 - beta), "max_kl": math.inf, "step_damping": 1.0, "update_every": 1,
        "refine": 0,
    }  # fmt: skip
    return surgery, tuning


def prune_run(
    config: Config, dense: Dense, arm: str, seed: int, *, pattern: str, sparsities: tuple[float, ...]
) -> Results:
    """Algorithm 1 from the dense model: the test accuracy right after each pruning and after its training."""
    examples, model = dense.examples, dense.model()
    surgery, tuning = arm_options(config, arm)
    surgeon = Surgeon(
        model, examples.batches(config, seed=100 + seed), pattern=pattern,
        generator=torch.Generator().manual_seed(seed), **surgery,
    )  # fmt: skip
    rows: list[dict[str, float | None]] = []
    start, cpu = time.perf_counter(), time.process_time()

    def pruned(step: PruneStep) -> None:
        rows.append({"sparsity": step.sparsity, "before": test_accuracy(model, examples, config.device)})

    def tuned(step: PruneStep) -> None:
        rows[-1]["after"] = test_accuracy(model, examples, config.device)
        left = (time.perf_counter() - start) / len(rows) * (len(sparsities) - len(rows))
        dense.progress(
            f"   {step.target:.1%} removed: {rows[-1]['before']:.2f} -> {rows[-1]['after']:.2f} %"
            + (f", about {duration(left)} left of this part" if left else "")
        )

    training = examples.batches(config, seed=seed)
    try:
        gradual(surgeon, sparsities, training, FineTuning(**tuning), on_prune=pruned, on_stage=tuned)
    except ValueError as error:
        if "finite" not in str(error):
            raise
        dense.progress(f"   diverged: {error}")
        rows = [{"before": None, "after": None, **row} for row in rows]
        rows += [{"sparsity": s, "before": None, "after": None} for s in sparsities[len(rows) :]]
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {"rows": rows, "seconds": seconds, "cpu_seconds": cpu_seconds}


def check_device(config: Config) -> None:
    """The device can be used, or the reason why not before any work."""
    try:
        torch.empty(1, device=config.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {config.device!r} cannot be used: {str(error).splitlines()[0]}") from None


def units(
    config: Config,
    dense: Callable[[], Dense],
    arms: Sequence[str],
    *,
    pattern: str,
    sparsities: tuple[float, ...],
    dense_cost: float,
) -> list[Unit]:
    """The dense model, then every (arm, seed), seed by seed: what a stopped run has done can be compared."""

    def compute(arm: str, seed: int) -> Callable[[Results], Any]:
        def run(done: Results) -> Any:
            found = dense().record()["weights"]
            if done["dense"]["weights"] != found:
                raise ValueError(
                    f"the results are those of another dense model ({done['dense']['weights']}) than "
                    f"{dense().path} ({found}): move one of the two away"
                )
            return prune_run(config, dense(), arm, seed, pattern=pattern, sparsities=sparsities)

        return run

    work = [Unit("dense", lambda _: dense().record(), dense_cost)]
    epochs = config.epochs * len(sparsities)
    return work + [
        Unit(f"{arm}, seed {seed}", compute(arm, seed), epochs * COST[arm], needs=("dense",))
        for seed in sorted({seed for arm in arms for seed in config.seeds_of(arm)})
        for arm in arms
        if seed in config.seeds_of(arm)
    ]


@dataclass(frozen=True)
class Experiment:
    """What tells the two experiments apart."""

    name: str
    pattern: str
    schedule: str  # the field of Config with its sparsities
    arms: str  # and that with its arms
    summary: Callable[[Config, Results], Results]
    draw: Callable[[Config, Results], Any]

    def run(
        self,
        out: Path,
        *,
        smoke: bool = False,
        progress: Progress = print,
        config: str = "cifar10",
        data: Path | None = None,
        download: bool = False,
        device: str | None = None,
        jobs: int = 1,
    ) -> Results:
        """Run what is missing of one configuration; writes `NAME-CONFIG.json` and `.png` to `out`.

        `jobs` processes share the work, and the cores: two of one thread do more than one of two.
        """
        need_matplotlib()
        config = "smoke" if smoke else config
        chosen = load(config, **({"device": device} if device else {}))
        check_device(chosen)

        @cache
        def dense() -> Dense:
            return Dense(chosen, load_data(chosen, data, progress, download=download), out, progress)

        path = out / f"{self.name}-{Path(config).stem}.json"
        settings, sparsities = chosen.settings(self.schedule), getattr(chosen, self.schedule)
        work = units(
            chosen, dense, getattr(chosen, self.arms), pattern=self.pattern, sparsities=sparsities,
            dense_cost=epochs_to_train(chosen, out),
        )  # fmt: skip
        if jobs > 1 and missing(path, settings, work):
            dense()  # what is wrong with the data is told once
            given = {"--data": data, "--device": device, "--config": None if smoke else config}
            flags = [str(word) for flag in given.items() if flag[1] for word in flag]
            code = run_workers(
                ["reproduce", self.name, "--out", str(out), *flags, *["--smoke"] * smoke], jobs
            )
            if code and missing(path, settings, work):
                raise ValueError(f"a worker ended with exit code {code}; what is done is kept")
        results = run_units(path, settings, work, progress, needs=dense)
        with Claims(path) as claims, claims.writing():  # every worker comes here
            record = finish(path, settings, results, self.summary(chosen, results))
            save_picture(self.draw(chosen, record), path.with_suffix(".png"), smoke=smoke)
        return record

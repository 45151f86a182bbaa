"""One experiment with ResNet18: its arms (scorer and optimizer), a pruning run, and all runs of a figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fishleg import AuxiliaryOptions, FineTuningOptions, PruneStep, PruningOptions, PruningSession
from fishleg.pruning import Pruned, StageDone
from fishleg.runtime.batchnorm import refresh_batchnorm
from reproduction.figures.resnet18.config import CONTROL, Config, load
from reproduction.figures.resnet18.dense import Dense, epochs_to_train, load_data
from reproduction.harness import (
    Progress,
    RecordFile,
    Results,
    Unit,
    duration,
    missing,
    need_matplotlib,
    run_figure,
    run_workers,
)

SGD_RATE = {"ours": 0.05, "paper": 1e-3}
# of an epoch of each arm, in epochs of SGD: for the estimate of the time left
COST = {
    CONTROL: 1.0,
    "magnitude + SGD": 1.0,
    "magnitude + FishLeg": 1.4,
    "OBS + SGD": 1.6,
    "FLS + SGD": 2.2,
    "FLS + FishLeg": 2.4,
}


def arm_options(config: Config, arm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the pruning and of the fine-tuning for "scorer + optimizer", as the preset has them."""
    scorer, _, optimizer = arm.partition(" + ")
    scorer = "magnitude" if arm == CONTROL else scorer
    scorers: dict[str, dict[str, Any]] = {
        "magnitude": {"method": "magnitude", "compensation": "none", "samples": config.fishleg_samples},
        # oBERT's: empirical Fisher, blocks of 50, single updates added up; damping and floor are ours
        "OBS": {"method": "obert", "compensation": "sum", "empirical": True, "samples": config.obs_samples},
        "FLS": {"samples": config.samples},
    }
    surgery = {**scorers[scorer], "refine_steps": config.refine}
    tuning: dict[str, Any] = {"optimizer": "sgd", "lr": SGD_RATE[config.preset]}
    if optimizer == "FishLeg":
        tuning = {"optimizer": "fishleg"}
        if config.preset == "paper":
            paper, tuning = paper_preset(config)
            surgery = {**surgery, **paper}
            if scorer == "magnitude":
                surgery["compensation"] = "none"
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
        estimator="probe", groups=1, lr=1e-6 if tiny else 1e-5, betas=(0.9, 0.999), precondition=True
    )
    surgery = {
        "gamma": 1.0 if tiny else 1e-3, "scale": 1.0 if tiny else 10.0, "structure": "scaled-kronecker",
        "samples": 100, "sub_batch": config.batch_size, "auxiliary": auxiliary, "compensation": "sum",
        "batch_statistics": False, "refine_steps": 0,
    }  # fmt: skip
    tuning = {
        "optimizer": "fishleg", "lr": (1e-2 if tiny else 1e-3) * (1 - beta), "momentum": beta,
        "weight_decay": 1e-5 / (1 - beta), "max_kl": None, "step_damping": 1.0, "update_every": 1,
    }  # fmt: skip
    return surgery, tuning


def prune_run(
    config: Config, dense: Dense, arm: str, seed: int, *, pattern: str, sparsities: tuple[float, ...]
) -> Results:
    """Algorithm 1 from the dense model: the test accuracy right after each pruning and after its training."""
    if arm == CONTROL:  # shares so small that no weight is removed
        pattern, sparsities = "global", tuple(1e-12 * (i + 1) for i in range(len(sparsities)))
    examples, model = dense.examples, dense.model()
    surgery, tuning = arm_options(config, arm)
    session = PruningSession(
        model,
        examples.batches(config, seed=100 + seed),
        options=PruningOptions(**surgery, pattern=pattern),
        fine_tuning=FineTuningOptions(**tuning),
        train_loader=examples.batches(config, seed=seed),
        generator=torch.Generator().manual_seed(seed),
    )
    rows: list[dict[str, float | None]] = []
    start, cpu = time.perf_counter(), time.process_time()

    def pruned(step: PruneStep) -> None:
        if arm == CONTROL:  # a pruning that removes nothing does not refresh the statistics
            surgeon = session.surgeon
            refresh_batchnorm(model, surgeon.loader, surgeon.options.batchnorm_batches)
        rows.append({"sparsity": step.sparsity, "before": examples.test_accuracy(model, config.device)})

    def tuned(step: PruneStep) -> None:
        rows[-1]["after"] = examples.test_accuracy(model, config.device)
        left = (time.perf_counter() - start) / len(rows) * (len(sparsities) - len(rows))
        dense.progress(
            f"   {step.target:.1%} removed: {rows[-1]['before']:.2f} -> {rows[-1]['after']:.2f} %"
            + (f", about {duration(left)} left of this part" if left else "")
        )

    try:
        for event in session.run(sparsities):
            if isinstance(event, Pruned):
                pruned(event.step)
            elif isinstance(event, StageDone):
                tuned(event.step)
    except ValueError as error:
        if "finite" not in str(error):
            raise
        dense.progress(f"   diverged: {error}")
        rows = [{"before": None, "after": None, **row} for row in rows]
        rows += [{"sparsity": s, "before": None, "after": None} for s in sparsities[len(rows) :]]
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {"rows": rows, "seconds": seconds, "cpu_seconds": cpu_seconds}


def check_device(config: Config) -> None:
    """Raise before any work if the device cannot be used."""
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
    """The dense model, then every (arm, seed), seed by seed: the arms of a stopped run can be compared."""

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
    """The differences between the two experiments, and the run that they share."""

    name: str
    pattern: str
    schedule: str  # the field of Config with its sparsities
    arms: str  # the field of Config with its arms
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
        file = RecordFile(path, chosen.settings(self.schedule))
        work = units(
            chosen, dense, getattr(chosen, self.arms), pattern=self.pattern,
            sparsities=getattr(chosen, self.schedule), dense_cost=epochs_to_train(chosen, out),
        )  # fmt: skip
        if jobs > 1 and missing(file, work):
            dense()  # an error in the data is reported once, by this process
            given = {"--data": data, "--device": device, "--config": None if smoke else config}
            flags = [str(word) for flag in given.items() if flag[1] for word in flag]
            smoke_flag = ["--smoke"] if smoke else []
            code = run_workers(["figure", self.name, "--out", str(out), *flags, *smoke_flag], jobs)
            if code and missing(file, work):
                raise ValueError(f"a worker ended with exit code {code}; what is done is kept")
        return run_figure(
            path,
            file.settings,
            work,
            summary=lambda results: self.summary(chosen, results),
            draw=lambda record: {"": self.draw(chosen, record)},
            smoke=smoke,
            progress=progress,
            prepare=dense,
        )

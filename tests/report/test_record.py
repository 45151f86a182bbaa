"""Reading a run's events."""

from fishleg.report.record import collect_steps


def test_steps_of_resumed_and_rejected_runs() -> None:
    prune = {"event": "prune", "stage": 1, "sparsity": 0.5, "metric": 0.8}
    stage = {"event": "stage", "stage": 1, "sparsity": 0.5, "metric": 0.9}
    trial = {"event": "prune", "stage": 2, "sparsity": 0.9, "metric": 0.5}
    rollback = {"event": "rollback", "sparsity": 0.9, "metric": 0.6, "reason": "too far"}
    events = [prune, stage, {**prune, "metric": 0.81}, {**stage, "metric": 0.91}, trial, rollback, trial]
    steps = collect_steps(events, "metric")
    assert [(s.sparsity, s.pruned, s.tuned, s.rejected) for s in steps] == [
        (0.5, 0.81, 0.91, False),
        (0.9, 0.5, 0.6, True),
        (0.9, 0.5, None, False),
    ]

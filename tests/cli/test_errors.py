"""Wrong input on the command line: one clear message, a non-zero exit code, nothing written, at once."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fishleg.cli.commands import main


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def refused(folder: Path, arguments: list[str], fragment: str) -> Result:
    """Run a command that must fail as described at the top of this file."""
    before, started = snapshot(folder), time.monotonic()
    result = CliRunner().invoke(main, arguments)
    seconds = time.monotonic() - started
    assert isinstance(result.exception, SystemExit), (result.exception, result.output)
    assert result.exit_code not in (0, None)
    assert fragment in result.output, result.output
    assert "Traceback" not in result.output
    starts = [line for line in result.output.splitlines() if line.startswith(("error:", "Error:"))]
    assert len(starts) == 1, result.output
    assert seconds < 5
    assert snapshot(folder) == before
    return result


RUN = "prune net.py:make --data data.py:loader"


PRUNE = f"{RUN} -s 0.5"


SENSITIVITY = "sensitivity net.py:make --data data.py:loader"


CASES: dict[str, list[tuple[str, str]]] = {
    "the command line": [
        ("prun net.py:make", "there is no command 'prun'; did you mean 'prune'?"),
        (f"{PRUNE} --sparsty 0.9", "--sparsty"),
        (f"{PRUNE} --stages two", "--stages must be a whole number >= 1, got 'two'"),
        (f"{PRUNE} --stages 2.5", "--stages must be a whole number >= 1, got '2.5'"),
        (f"{RUN} --sparsities 0.5,,0.9", "--sparsities must be a number, got ''"),
        (f"{PRUNE} --seed", "--seed"),
        (f"{PRUNE} another", "another"),
        ("prune", "MODEL is missing"),
        ("resume", "DIRECTORY"),
        ("doctor --all", "--all"),
        ("demo --steps", "--steps"),
    ],
    "how sparse": [
        (f"{RUN} -s 0", "sparsity must be in (0, 1), got 0"),
        (f"{RUN} -s 1", "sparsity must be in (0, 1), got 1"),
        (f"{RUN} -s 1.5", "sparsity must be in (0, 1), got 1.5; for 1.5 % write 0.015"),
        (f"{RUN} -s 90", "got 90.0; for 90 % write 0.9"),
        (f"{RUN} -s -0.5", "sparsity must be in (0, 1), got -0.5"),
        (f"{RUN} -s nan", "sparsity must be in (0, 1), got nan"),
        (f"{RUN} -s 90%", "--sparsity must be a number in (0, 1), got '90%'; for 90 % write 0.9"),
        (f"{RUN} -s 0.9999", "at most 0.99"),
        (f"{RUN} -s 0.9 --floor 1", "floor must be in [0, 1), got 1"),
        (f"{RUN} --sparsities 0.9,0.5", "sparsities must rise, got 0.9 before 0.5"),
        (f"{RUN} --sparsities 0.5,1.5", "got 1.5"),
        (f"{RUN} --sparsities 0.5,0.9 --stages 2", "leave out stages"),
        (f"{RUN} --max-drop 0", "max_drop must be in (0 %, 100 %), got '0'"),
        (f"{RUN} --max-drop 100%", "max_drop must be in (0 %, 100 %), got '100%'"),
        (f"{RUN} --max-drop abc", "max_drop must be a number or a percentage such as 1%, got 'abc'"),
        (f"{RUN} --max-drop 1% --mode one-shot", "max_drop is a search in stages"),
        (f"{RUN} --max-params 0", "max_params must be >= 1, got 0"),
        (f"{RUN} --max-params 1000000", "the model has only 314"),
        (f"{RUN} --max-params 250 --pattern rows", "max_params cannot tell how many rows to remove"),
        (f"{RUN} --max-params 20", "26 parameters (biases, norms, excluded ones) stay"),
        (f"{RUN} --max-flops 0", "max_flops must be > 0, got '0'"),
        (f"{RUN} --max-flops 120%", "max_flops must be in (0 %, 100 %), got '120%'"),
        (f"{RUN} --max-flops 1e9", "the model needs only 288"),
        (f"{RUN} --max-flops 40% --exclude 0.weight", "layers that are not pruned need 128"),
        (f"{RUN} --max-flops 20% --pattern 2:4", "the pattern keeps 144 at least"),
        (f"{PRUNE} --max-params 100", "give one of sparsity, sparsities"),
        (f"{PRUNE} --pattern 4:2", "0 < N < M, got 4:2; did you mean '2:4'?"),
        (f"{PRUNE} --pattern 0:4", "got 0:4"),
        (f"{PRUNE} --pattern globl", "got 'globl'; did you mean 'global'?"),
        (f"{PRUNE} --pattern block:1", "a block needs at least 2 weights, got 1"),
        (f"{RUN} -s 0.9 --pattern 2:4", "pattern 2:4 allows a sparsity of 0.5 at most, got 0.9"),
        ("prune net.py:odd --data data.py:seven --pattern 2:4", "7 inputs are not a multiple of 4"),
        (f"{PRUNE} --include fc", "'fc' matches no parameter"),
        (f"{PRUNE} --exclude [", "exclude: '[' is no regular expression"),
        (f"{PRUNE} --include 0 --exclude weight", "nothing to prune"),
    ],
    "method and run": [
        (f"{PRUNE} --method fishleg2", "got 'fishleg2'; did you mean 'fishleg'?"),
        (f"{PRUNE} --mode gradul", "got 'gradul'; did you mean 'gradual'?"),
        (f"{PRUNE} --mode one-shot --stages 3", "mode 'one-shot' is a single stage, got stages = 3"),
        (f"{PRUNE} --mode one-shot --schedule cubic", "is a single stage, got schedule = 'cubic'"),
        (f"{PRUNE} --optimizer adamw", "got 'adamw'; did you mean 'adam'?"),
        (f"{PRUNE} --likelihood gauss", "got 'gauss'"),
        (f"{PRUNE} --compensation all", "compensation must be one of joint"),
        (f"{PRUNE} --schedule qubic", "did you mean 'cubic'?"),
        (f"{PRUNE} --stages 0", "stages must be >= 1, got 0"),
        (f"{PRUNE} --samples 0", "samples must be >= 1, got 0"),
        (f"{PRUNE} --gamma 0", "gamma must be > 0, got 0"),
        (f"{PRUNE} --lr inf", "lr must be > 0, got inf"),
        (f"{PRUNE} --momentum 1", "momentum must be in [0, 1), got 1"),
        (f"{PRUNE} --epochs 0 --mode gradual", "epochs must be > 0, got 0"),
        (f"{PRUNE} --seed -1", "seed must be in [0, 4294967296), got -1"),
        (f"{PRUNE} --threads 0", "threads must be >= 1, got 0"),
        (f"{PRUNE} --keep 0", "keep must be >= 1, got 0"),
        (f"{PRUNE} --device tpu9", "device 'tpu9' cannot be used"),
        (f"{PRUNE} --device cuda:77", "device 'cuda:77' cannot be used"),
        (f"{PRUNE} --device meta", "device 'meta' cannot be used"),
        (f"{PRUNE} --train-data data.py:loader", "train_data needs mode = 'gradual', got mode = 'staged'"),
        (f"{PRUNE} --method kfac --empirical", "empirical = true needs one of the methods"),
        ("prune net.py:make --data data.py:unlabelled --method obert --empirical", "needs labels"),
        ("prune net.py:wide --data data.py:loader --method exact", "at most 4096 parameters"),
        ("prune net.py:make --data data.py:unlabelled --mode gradual", "fine-tuning needs (inputs, targets)"),
        ("prune net.py:make --data data.py:no_length --mode gradual", "give steps instead"),
        (f"{PRUNE} --tensorboard", "pip install tensorboard"),
        (f"{PRUNE} --wandb project", "pip install wandb"),
        (f"{PRUNE} --out done", "holds a run already (finished)"),
        (f"{PRUNE} --out damaged", "holds a run already (interrupted)"),
        (f"{PRUNE} --out garbled", "run.json cannot be read"),
        (f"{PRUNE} --out net.py", "net.py is a file, not a directory"),
        (f"{PRUNE} --out net.py/below/it", "net.py is a file, not a directory"),
        (f"{PRUNE} --out used", "holds model.safetensors, which a run would overwrite"),
        (f"{PRUNE} --out {300 * 'x'}", ": File name too long\n"),
    ],
    "recipes": [
        ("prune --recipe missing.toml", "cannot read recipe missing.toml: No such file"),
        ("prune --recipe empty", "cannot read recipe empty: Is a directory"),
        ("prune --recipe binary.toml", "is not a text file"),
        ("prune --recipe recipe.txt", "must be a .toml, .yaml or .json file, got 'recipe.txt'"),
        ("prune --recipe spelling.toml", "unknown key 'sparsty' in [target]"),
        ("prune --recipe spelling.toml -s 0.4", "did you mean 'sparsity'?"),
        ("prune --recipe section.toml", "unknown section 'modle' in the recipe"),
        ("prune --recipe misplaced.toml", "it belongs under [target]"),
        ("prune --recipe top.toml", "it belongs under [target]"),
        ("prune --recipe list.toml", "samples must be a whole number, got [1, 2]"),
        ("prune --recipe text.toml", "sparsity must be a number, got '90'"),
        ("prune --recipe bool.toml", "samples must be a whole number, got True"),
        ("prune --recipe fraction.toml", "stages must be a whole number, got 2.5"),
        ("prune --recipe flag.toml", "empirical must be true or false, got 'yes'"),
        ("prune --recipe one_text.toml", "exclude must be a list of texts, got '0'"),
        ("prune --recipe mixed.toml", "sparsities must be a list of numbers"),
        ("prune --recipe nan.toml", "sparsity must be in (0, 1), got nan"),
        ("prune --recipe two.toml", "got sparsity and max_params"),
        ("prune --recipe syntax.toml", "recipe syntax.toml cannot be read"),
        ("prune --recipe twice.toml", "recipe twice.toml cannot be read"),
        ("prune --recipe null.toml", "model must be UTF-8 text without null characters"),
        ("prune --recipe huge.json", "seed must be in [0, 4294967296)"),
        ("prune --recipe syntax.json", "recipe syntax.json cannot be read"),
        ("prune --recipe array.json", "must hold sections, got list"),
        ("prune --recipe syntax.yaml", "recipe syntax.yaml cannot be read"),
        ("prune --recipe code.yaml", "recipe code.yaml cannot be read"),
        ("prune --recipe empty.yaml", "must hold sections, got NoneType"),
        ("prune --recipe flat.yaml", "[model] must be a section with keys, got 'net.py:make'"),
        ("compare --recipe spelling.toml", "did you mean 'sparsity'?"),
        ("eval --recipe list.toml", "samples must be a whole number, got [1, 2]"),
    ],
    "models": [
        ("prune net.py --data data.py:loader", "model must be file.py:function"),
        ("prune missing.py:make --data data.py:loader", "there is no file"),
        ("prune net.py:mak --data data.py:loader", "did you mean 'make'?"),
        ("prune net.py:number --data data.py:loader", "net.py:number is a int, not a function"),
        ("prune nonet:make --data data.py:loader", "there is no module 'nonet' (for a file, write nonet.py"),
        ("prune torn.py:make --data data.py:loader", "SyntaxError: invalid syntax (torn.py, line 1)\n"),
        ("prune lacking.py:make --data data.py:loader", "No module named 'no_such_package'"),
        ("prune lacking:make --data data.py:loader", "'no_such_package' (imported by lacking)"),
        ("prune script.py:make --data data.py:loader", "script.py raised SystemExit: 2 (script.py, line 3)"),
        ("prune net.py:leaving --data data.py:loader", "net.py:leaving raised SystemExit: 3"),
        ("prune net.py:raising --data data.py:loader", "RuntimeError: out of cheese (net.py, line 14)"),
        ("prune net.py:needy --data data.py:loader", "missing 1 required positional argument: 'width'"),
        ("prune net.py:pair --data data.py:loader", "must return a torch.nn.Module, got tuple"),
        ("prune net.py:nothing --data data.py:loader", "must return a torch.nn.Module, got NoneType"),
        ("prune net.py:bare --data data.py:loader", "a module without parameters"),
        ("prune net.py:frozen --data data.py:loader", "nothing to prune"),
        ("prune net.py:poisoned --data data.py:loader", "outputs on batch 1 are not finite"),
        ("prune net.py:text_out --data data.py:loader", "the model returned str"),
        ("prune workload:digit", "unknown workload 'digit'"),
        ("prune workload:digits --data missing.py:loader", "data: there is no file"),
        ("prune workload:digits --weights missing.pt", "weights: there is no file"),
    ],
    "weights": [
        (f"{PRUNE} --weights missing.pt", "weights: there is no file"),
        (f"{PRUNE} --weights weights", "weights is a directory"),
        (f"{PRUNE} --weights extra.pt", "does not fit the model: unknown 3.weight"),
        (f"{PRUNE} --weights part.pt", "does not fit the model: missing 0.bias, 2.weight, 2.bias"),
        (f"{PRUNE} --weights shape.pt", "0.weight is [16, 9], the model has [16, 8]"),
        (f"{PRUNE} --weights nan.pt", "nan.pt holds NaN or Inf in 0.bias"),
        (f"{PRUNE} --weights whole.pt", "not the whole model"),
        (f"{PRUNE} --weights list.pt", "holds no state dict of tensors, but a list"),
        (f"{PRUNE} --weights numbered.pt", "holds no state dict of tensors: 0 is"),
        (f"{PRUNE} --weights numbers.pt", "holds no state dict of tensors: 'epoch' is a int"),
        (f"{PRUNE} --weights none.pt", "holds no state dict of tensors"),
        (f"{PRUNE} --weights text.pt", "text.pt cannot be read as a state dict"),
        (f"{PRUNE} --weights cut.pt", "cut.pt cannot be read as a state dict"),
        (f"{PRUNE} --weights bytes.safetensors", "bytes.safetensors cannot be read as a state dict"),
        (f"{PRUNE} --weights half.safetensors", "half.safetensors cannot be read as a state dict"),
    ],
    "data": [
        ("prune net.py:make", "data is missing"),
        ("prune net.py:make --data data.py", "data must be file.py:function"),
        ("prune net.py:make --data data.py:loder", "did you mean 'loader'?"),
        ("prune net.py:make --data data.py:empty", "data: the loader is empty"),
        ("prune net.py:make --data data.py:hollow", "got float32 tensor of shape (0, 10)"),
        ("prune net.py:make --data data.py:nan", "data: the first batches hold NaN or Inf in their inputs"),
        ("prune net.py:make --data data.py:second_nan", "hold NaN or Inf in their inputs"),
        ("prune net.py:make --data data.py:doubles", "([16, 8] float64, [16] int64)"),
        ("prune net.py:make --data data.py:longs", "[16, 8] int64"),
        ("prune net.py:make --data data.py:ten", "label 10 is out of range: labels must be in 0..9"),
        ("prune net.py:make --data data.py:minus", "label -1 is out of range"),
        (f"{PRUNE} --eval-data data.py:late_ten", "batch 5 of the data to evaluate on: label 10 is out of"),
        ("prune net.py:make --data data.py:floats", "needs integer labels of shape (16,)"),
        ("prune net.py:make --data data.py:short_labels", "got int64 tensor of shape (5,)"),
        (f"{PRUNE} --likelihood gaussian", "Gaussian needs targets of shape (16, 10)"),
        ("prune net.py:make --data data.py:nan_targets --likelihood gaussian", "NaN or Inf in their targets"),
        ("prune net.py:make --data data.py:targets_of_two --likelihood bernoulli", "in [0, 1], got 2.0"),
        ("prune net.py:make --data data.py:threes", "data: a batch of 3 parts is ambiguous"),
        ("prune net.py:make --data data.py:words", "data: the model cannot be called on batch 1"),
        ("prune net.py:make --data data.py:images", "needs integer labels of shape (16, 3, 8)"),
        ("prune net.py:conv --data data.py:grey", "[16, 1, 8, 8] float32"),
        ("prune net.py:make --data data.py:nothing", "another iterable, got NoneType"),
        ("prune net.py:make --data data.py:number", "another iterable, got int"),
        ("prune net.py:make --data data.py:generator", "an iterator, which can be read once only"),
        ("prune net.py:make --data data.py:once", "an iterator, which can be read once only"),
        ("prune net.py:make --data data.py:torn", "data: drawing batch 2 raised RuntimeError: shard 2"),
        ("prune net.py:make --data data.py:raising", "OSError: the disk is on fire (data.py"),
        ("prune net.py:make --data data.py:needy", "missing 1 required positional argument: 'path'"),
        (f"{PRUNE} --eval-data data.py:empty", "eval_data: the loader is empty"),
        (f"{PRUNE} --mode gradual --train-data data.py:ten", "train_data: label 10 is out of range"),
        (f"{PRUNE} --forward net.py:cal_pair", "did you mean 'call_pair'?"),
        (f"{PRUNE} --forward net.py:call_pair", "needs a floating-point output tensor, got tuple"),
        (f"{PRUNE} --forward net.py:call_bare", "data: the model cannot be called on batch 1"),
        (f"{PRUNE} --metric net.py:metric", "metric: net.py has no 'metric'"),
        (f"{PRUNE} --metric net.py:say", "metric: the function must return a number, got 'good'"),
        (f"{PRUNE} --metric net.py:nan", "metric: the function must return a finite number, got nan"),
        (f"{PRUNE} --metric net.py:none", "metric: the function must return a number, got None"),
        (f"{PRUNE} --metric net.py:broken_metric", "metric: the function raised KeyError: 'score' (net.py"),
        (f"{PRUNE} --metric net.py:metric_of_one", "metric: the function raised TypeError"),
    ],
    "resume": [
        ("resume missing", "there is no run in"),
        ("resume net.py", "there is no run in"),
        ("resume empty", "there is no run in"),
        ("resume done", "is finished: there is nothing to resume"),
        ("resume garbled", "run.json cannot be read"),
        ("resume listed", "run.json holds no record of a run"),
        ("resume baseless", "run.json holds no record of a run"),
        ("resume no-dense", "there is no checkpoint"),
        ("resume cut-dense", "dense.ckpt is damaged"),
        ("resume no-recipe", "cannot read recipe"),
        ("resume bad-recipe", "sparsity must be in (0, 1), got 2.0"),
        ("resume damaged", "can be read"),
        ("resume other-model", "the run's own copy does not fit the model"),
    ],
    "the other commands": [
        ("compare", "MODEL is missing"),
        ("compare net.py:make --data data.py:loader --methods magnitud", "did you mean 'magnitude'?"),
        ("compare net.py:make --data data.py:loader --methods ,", "must name at least one of"),
        ("compare net.py:make --data data.py:loader --methods obert,obert", "methods must differ"),
        ("compare net.py:make --data data.py:loader --out done", "done holds a single run"),
        ("compare net.py:make --data data.py:loader --out net.py", "is a file, not a directory"),
        ("compare net.py:make --data data.py:ten", "label 10 is out of range"),
        ("compare net.py:make --data data.py:loader --methods magnitude,kfac --empirical", "got 'kfac'"),
        ("sensitivity", "MODEL is missing"),
        ("sensitivity net.py:make", "data is missing"),
        (f"{SENSITIVITY} --sparsity 2", "sparsity must be in (0, 1), got 2"),
        (f"{SENSITIVITY} --pattern 2:4 --sparsity 0.9", "0.5 at most, got 0.9"),
        (f"{SENSITIVITY} --device gpu", "device 'gpu' cannot be used"),
        (f"{SENSITIVITY} --picture a.doc", "must end in .png, .svg, .pdf, got"),
        (f"{SENSITIVITY} --picture no/a.png", "there is no directory to write"),
        ("inspect missing", "there is no file missing"),
        ("inspect text.pt", "text.pt cannot be read as a state dict"),
        ("inspect net.py", "net.py cannot be read as a state dict"),
        ("inspect whole.pt", "not the whole model"),
        ("inspect empty", "there is no model and no checkpoint in empty"),
        ("inspect garbled", "run.json cannot be read"),
        ("inspect damaged", "can be read"),
        ("inspect good.safetensors --pattern 4:2", "an N:M pattern needs 0 < N < M, got 4:2"),
        ("inspect numbers.ckpt", "numbers.ckpt holds no state dict of tensors"),
        ("inspect list.ckpt", "list.ckpt holds no state dict of tensors"),
        ("inspect cut-dense/dense.ckpt", "dense.ckpt is damaged"),
        ("eval", "MODEL is missing"),
        ("eval net.py:make", "eval_data is missing"),
        ("eval net.py:make --eval-data data.py:unlabelled", "there are no labels to measure with"),
        ("eval net.py:make --eval-data data.py:ten", "eval_data: label 10 is out of range"),
        ("eval net.py:make --eval-data data.py:loader --weights shape.pt", "the model has [16, 8]"),
        ("eval net.py:make --eval-data data.py:loader --metric net.py:say", "return a number, got 'good'"),
        ("eval --run missing", "there is no run in missing"),
        ("eval --run modelless", "has no model yet (interrupted)"),
        ("eval net.py:make --run done", "leave out everything else"),
        ("demo --out net.py", "out: net.py cannot be written"),
        ("demo --out net.py/below", "out: net.py/below cannot be written"),
    ],
}  # fmt: skip


ALL = [(line, fragment) for cases in CASES.values() for line, fragment in cases]


def test_there_are_enough_cases():
    assert len(ALL) >= 70
    assert len({line for line, _ in ALL}) == len(ALL)


@pytest.mark.parametrize(("line", "fragment"), ALL, ids=[line[:70] for line, _ in ALL])
def test_wrong_input(work: Path, line: str, fragment: str) -> None:
    refused(work, line.split(), fragment)


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (f"{SENSITIVITY} --samples 8 --pattern 2:4", "0.weight"),  # judged at what the pattern allows
        ("sensitivity net.py:tiny --data data.py:loader --samples 8 --method diagonal", "2.weight"),
        (
            "eval net.py:frozen --eval-data data.py:loader",
            "accuracy",
        ),  # there is nothing to prune, and no need
        ("eval --run done", "accuracy"),
        ("eval --run unlabelled", "agreement"),  # with the dense model, not with itself
        ("inspect done", "sparsity of the prunable matrices: 50.00%"),
    ],
)
def test_what_is_right_is_not_refused(work: Path, line: str, fragment: str) -> None:
    before = snapshot(work)
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    assert fragment in result.output
    assert "agreement: 1.0" not in result.output
    assert snapshot(work) == before


def test_read_only_directory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    refused(work, [*PRUNE.split(), "--out", "sub/run"], "is read-only")


def test_empty_texts(work: Path) -> None:
    refused(work, ["prune", "", "--data", "data.py:loader"], "MODEL is missing")
    refused(work, [*PRUNE.split(), "--device", ""], "device '' cannot be used")
    refused(work, [*PRUNE.split(), "--weights", ""], "is a directory")


def test_a_run_that_another_process_works_on_is_left_alone(work: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    run = tmp_path / "run"
    shutil.copytree(work / "done", run)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    # a process of its own: one and the same may take the lock as often as it likes
    code = f"import fcntl, time; f = open({str(run / 'lock')!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    other = subprocess.Popen(
        [sys.executable, "-c", code + "print('locked', flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        refused(tmp_path, ["resume", str(run)], "another process is working on")
    finally:
        other.kill()
        other.communicate()


def test_debug_shows_where(work: Path) -> None:
    result = CliRunner().invoke(main, ["--debug", *PRUNE.split(), "--weights", "missing.pt"])
    assert result.exit_code == 1
    assert "Traceback" in result.output
    assert "error: weights: there is no file" in result.output


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-m", "fishleg", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (f"{RUN} -s 90", "error: sparsity must be in (0, 1), got 90.0; for 90 % write 0.9\n"),
        ("prune net.py:make --data data.py:ten", "error: data: label 10 is out of range"),
    ],
)
def test_in_a_process_of_its_own(work: Path, line: str, fragment: str) -> None:
    before, started = snapshot(work), time.monotonic()
    result = command(work, *line.split())
    assert time.monotonic() - started < 20  # importing torch on a busy machine; the rest is timed above
    assert result.returncode == 1
    assert result.stderr.startswith(fragment)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert snapshot(work) == before


@pytest.mark.slow
def test_debug_in_a_process_of_its_own(work: Path) -> None:
    result = command(work, "--debug", *PRUNE.split(), "--weights", "whole.pt")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: weights:")

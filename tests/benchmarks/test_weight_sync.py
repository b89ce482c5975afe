"""The weight-sync benchmark, run as its user runs it, on a small model."""

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.report import Report
from skipper.benchmarks.weight_sync.command import main
from skipper.benchmarks.weight_sync.given_model import read_model
from skipper.benchmarks.weight_sync.model import Model, fsdp, tensor_parallel
from skipper.benchmarks.weight_sync.planning import measure_planning
from skipper.torchstore.algebra.layout import uncovered
from tests.benchmarks.quick import quick_run

NAMES = [
    "sync_direct",
    "wire_amplification",
    "control_rpcs_per_sync",
    "sync_snapshot",
    "readers_3_vs_1",
    "newer_than_wake_p99_ms",
    "put_64B_p50_us",
    "get_64B_p50_us",
    "plan_compile_s",
    "plan_replay_us_per_op",
]


def test_a_quick_run_measures_everything_and_finds_every_byte_right() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "skipper.benchmarks.weight_sync", "--quick", "--json", "-"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = Report.from_dict(json.loads(run.stdout))
    rows = {row.name: row for row in report.results}
    assert list(rows) == NAMES
    assert report.errors == ()
    assert rows["wire_amplification"].value == 1.0
    assert rows["control_rpcs_per_sync"].max <= 2
    nbytes = 2 * Model(layers=2, vocabulary=4096).numel()
    for name in ("sync_direct", "sync_snapshot"):
        reference = rows[name].reference
        assert reference is not None
        assert reference.name == "memcpy"
        # Norms are whole on both generators, everything else lies on one of them.
        assert nbytes < int(str(rows[name].parameters["nbytes"])) < 1.01 * nbytes
    assert "sync_direct" in run.stderr  # the table, beside the JSON


def test_the_model_is_the_one_that_it_says() -> None:
    shapes = Model().shapes()
    assert (len(shapes), Model().numel()) == (290, 494_032_768)
    assert sum(map(prod, shapes.values())) == Model().numel()


@pytest.mark.parametrize("cut", [fsdp, tensor_parallel])
def test_the_ranks_of_a_side_hold_the_whole_model(cut: object) -> None:
    assert callable(cut)
    for layout in cut(Model(layers=1, vocabulary=100).shapes(), 3).values():
        boxes = {piece.box for rank in range(3) for piece in layout.pieces((rank,))}
        assert uncovered(layout.global_shape, frozenset(boxes)) == ()


def test_a_plan_of_a_large_job_is_made_and_replayed() -> None:
    planned = measure_planning(tensors=50, sources=8, readers=6, iterations=2)
    assert (planned.tensors, len(planned.compile_s), len(planned.replay_us)) == (50, 2, 20)
    assert planned.segments > planned.tensors


def test_a_model_that_is_given_goes_to_as_many_engines_as_asked_for(tmp_path: Path) -> None:
    shapes = {"embed_tokens.weight": [500, 64], "experts.down_proj": [4, 64, 32], "norm.weight": [64], "scale": []}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({name: {"shape": shape, "dtype": "BF16"} for name, shape in shapes.items()}))
    arguments = ["--model", str(path), "--mode", "direct", "--trainers", "1", "--generators", "2", "--tp", "2"]
    report, shown = quick_run("skipper.benchmarks.weight_sync", *arguments, "-n", "3")
    rows = {row.name: row for row in report.results}
    assert list(rows) == ["sync_direct", "wire_amplification", "control_rpcs_per_sync"]
    assert rows["sync_direct"].n == 3
    assert rows["wire_amplification"].value == 1.0
    whole_on_each_rank = 64 + 1
    elements = sum(map(prod, shapes.values())) + whole_on_each_rank
    parameters = rows["sync_direct"].parameters
    assert parameters["nbytes"] == 2 * 2 * elements
    assert (parameters["trainers"], parameters["generators"], parameters["tensor_parallel"]) == (1, 2, 2)
    assert "memcpy" in shown
    assert "\r" not in shown  # progress is for terminals
    assert "making the weights" not in shown


def test_a_backend_that_is_named_carries_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"w": [300, 64], "norm.weight": [64]}))
    arguments = ["--model", str(path), "--trainers", "1", "--tp", "1", "--backend", "ucx", "-n", "2"]
    report, _ = quick_run("skipper.benchmarks.weight_sync", *arguments)
    assert [row.name for row in report.results if row.name.startswith("sync_")] == ["sync_direct", "sync_snapshot"]
    assert report.config["backend"] == "ucx"


def test_a_backend_that_cannot_be_used_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--backend", "verbs"]) == 2
    assert "the verbs backend cannot be used here" in capsys.readouterr().err


def test_a_config_of_transformers_says_which_tensors_there_are(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 130}
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [], "tie_word_embeddings": True}
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "intermediate_size": 96, **sizes, **experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(str(tmp_path), layers=2)
    shapes = model.shapes()
    assert model.name == tmp_path.name
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (32, 64)
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (4, 64, 64)
    assert not any(name.startswith("model.layers.2.") for name in shapes)
    assert "lm_head.weight" not in shapes  # tied
    assert model.numel() == sum(map(prod, shapes.values()))
    with pytest.raises(UsageError, match="3 layers, and 4"):
        read_model(str(tmp_path / "config.json"), layers=4)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "JSON"),
        ("[1]", r"model\.json is not a model: pass a config of transformers with model_type, or"),
        ("{}", "no tensors"),
        ('{"w": [0]}', "no shape"),
        ('{"w": [true]}', "no shape"),
        ('{"w": {"shape": "2"}}', "no shape"),
        ('{"w": [1000000000, 1000000000]}', "larger"),
        ('{"model_type": "no such model"}', r"does not know the model_type 'no such model' of model: [^:]*$"),
        ('{"model_type": [1]}', r"does not know the model_type \[1\]"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers"),
    ],
)
def test_what_is_no_model_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        read_model(str(tmp_path / "model.json"))


def test_a_name_that_is_nowhere_is_refused_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        read_model("nobody/no-such-model")


def test_a_model_that_does_not_fit_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "huge.json").write_text('{"w": [10000000, 10000000]}')
    assert main(["--model", str(tmp_path / "huge.json")]) == 2
    assert "GB of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--json", "no/such/folder/report.json"), "no folder"),
        (("--quik",), "--quik"),
        (("--layers", "2"), "about --model"),
        (("--trainers", "0"), "whole number"),
        (("--generators", "200", "--tp", "200"), "too many"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_run(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpmoe.cli.main import COMMANDS, main
from cpmoe.cli.run_bench import benchmarks

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ["--recipe", str(ROOT / "recipes/quickstart.yaml")]
JSON = ["--deepspeed_config", str(ROOT / "ds_configs/quickstart.json")]


def test_the_module_runs_and_refuses_with_code_2(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "cpmoe", "validate", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)

    legal = run(*QUICKSTART, *JSON, "--world_size", "4")
    assert (legal.returncode, legal.stderr) == (0, "")
    assert "(world 4 = DP 2 x CP 2; EP 2)" in legal.stdout
    refused = run(*QUICKSTART, *JSON, "--world_size", "3", "optim.lr=0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: command line: optim.lr = 0: must be greater than 0; legal: numbers > 0\n"


def test_validate_prints_everything_that_was_resolved(capsys):
    arguments = [*QUICKSTART, "train.steps=77", *JSON, "--num_gpus", "8", "train.global_batch_size=16"]
    assert main(["validate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "steps: 77" in printed
    assert (
        "global batch 16 sequences = micro-batch 4 x accumulation 1 x DP 4   (world 8 = DP 4 x CP 2; EP 2)"
        in printed
    )
    assert "train_batch_size 32 = 4 x 1 x world 8" in printed
    assert "ring     4 x 2 ranks that share a sequence: [0 1] [2 3] [4 5] [6 7]" in printed
    assert "replica  2 x 4 ranks that hold the same experts: [0 2 4 6] [1 3 5 7]" in printed
    assert "auto\n" not in printed.partition("cpmoe\n")[2].partition("DeepSpeed\n")[2]
    assert "note: " not in printed
    assert printed.endswith("\nOK: float32, ZeRO stage 1, gradient clipping 1.0, 8 ranks\n")


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 2),
        (["cpmoe.context_parallel_size=4"], 4),
        (["cpmoe.expert_parallel_size=8", "cpmoe.context_parallel_size=4"], 8),
        (["cpmoe.rank_order=[cp, ep, dp]"], 4),
    ],
)
def test_validate_alone_takes_the_fewest_ranks(capsys, overrides, world_size):
    assert main(["validate", *QUICKSTART, *JSON, *overrides]) == 0
    assert f", {world_size} ranks (the fewest that this JSON can use; " in capsys.readouterr().out


def test_validate_notes_what_is_probably_not_meant_and_what_is_not_here(capsys, tmp_path):
    unprepared = f"data.path={tmp_path / 'data'}"
    assert main(["validate", *QUICKSTART, *JSON, unprepared, "train.steps=10"]) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'data'} is not prepared yet: `python -m cpmoe prepare` does it" in printed
    assert (
        "note: optim.warmup_steps = 30: is not below train.steps 10; the learning rate ends at 33%" in printed
    )
    missing = [unprepared, "data.source=nowhere/a.jsonl", "data.tokenizer=nowhere/tokenizer.json"]
    assert main(["validate", *QUICKSTART, *JSON, *missing]) == 0
    printed = capsys.readouterr().out
    assert "note: data.source = 'nowhere/a.jsonl': no such file or folder" in printed
    assert "note: data.tokenizer = 'nowhere/tokenizer.json': no such file here" in printed
    assert printed.splitlines()[-1].startswith("OK: ")


def test_validate_looks_at_the_data_that_is_there(capsys, tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40)))
    overrides = [f"data.source={source}", f"data.path={tmp_path / 'prepared'}"]
    small = ["model.vocab_size=256"]
    told = "error: model.vocab_size = 256: must be at least the 257 ids of "
    assert main(["validate", *QUICKSTART, *JSON, *overrides, *small]) == 2
    assert capsys.readouterr().err == f"{told}data.tokenizer 'bytes'; legal: 257 or more, or auto\n"
    assert main(["prepare", *QUICKSTART, *overrides]) == 0
    assert main(["validate", *QUICKSTART, *JSON, *overrides]) == 0
    assert "is prepared: vocabulary 257, " in capsys.readouterr().out
    assert main(["validate", *QUICKSTART, *JSON, *overrides, *small]) == 2
    assert capsys.readouterr().err.startswith(f"{told}the tokenizer in {tmp_path / 'prepared'}")
    assert main(["validate", *QUICKSTART, *JSON, *overrides, "data.heldout_fraction=0.5"]) == 2
    assert "data.heldout_fraction = 0.5, prepared with 0.05" in capsys.readouterr().err


def test_every_line_of_a_refusal_is_marked(capsys):
    assert main(["validate", *QUICKSTART, "cpmoe.expert_parallel=2", "optim.lr=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "error: command line: cpmoe.expert_parallel",
        "error: command line: optim.lr",
    ]


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_a_world_without_ranks(value):
    with pytest.raises(SystemExit) as stopped:
        main(["validate", *QUICKSTART, "--world_size", value])
    assert stopped.value.code == 2


def test_an_unknown_command(capsys):
    assert main(["valdate"]) == 2
    assert capsys.readouterr().err == (
        'error: valdate: unknown command, did you mean "validate"?; '
        "legal: bench, compare, env, prepare, validate\n"
    )


def test_help_lists_every_command_and_each_has_its_own(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    listing = capsys.readouterr().out
    for name, (module, summary) in COMMANDS.items():
        assert re.search(rf"  {name} +{re.escape(summary)}", listing)
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(module).main(["--help"])
        assert stopped.value.code == 0
        assert f"python -m cpmoe {name}" in capsys.readouterr().out


def test_prepare_writes_what_the_recipe_says(capsys, tmp_path):
    texts = [f"document {i}: " + "all work and no play " * i for i in range(40)]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    overrides = [f"data.source={source}", f"data.path={tmp_path / 'prepared'}"]
    assert main(["prepare", *QUICKSTART, *overrides]) == 0
    printed = capsys.readouterr().out
    assert "vocabulary 257" in printed
    counts = [int(number) for number in re.findall(r"(\d+) documents", printed)]
    assert len(counts) == 2
    assert sum(counts) == len(texts)
    assert main(["prepare", *QUICKSTART, *overrides, "data.seed=7"]) == 2
    assert "data." in capsys.readouterr().err
    assert main(["prepare", *QUICKSTART, *overrides, "data.seed=7", "--force"]) == 0


def test_env_names_versions_and_what_is_missing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for name in ("python", "torch", "deepspeed", "triton", "git commit", "flash-attn", "CPU cores"):
        assert name in printed
    assert importlib.metadata.version("deepspeed") in printed
    assert "not there yet" in printed
    if importlib.util.find_spec("megablocks") is None:
        assert re.search(r"megablocks +│ not installed", printed)


def test_bench_finds_its_modules_and_refuses_others(capsys):
    for name, summary in benchmarks().items():
        assert summary, name
        assert (ROOT / f"cpmoe/cli/bench/{name}.py").exists()
    assert "teams" not in benchmarks()
    assert main(["bench", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: nothing: unknown benchmark")


@pytest.mark.parametrize("name", ["attention", "exactness", "memory", "train"])
def test_help_of_a_benchmark_says_what_it_measures(capsys, name):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", name, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert benchmarks()[name] in printed
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert benchmarks()[name].splitlines()[0] in capsys.readouterr().out


def test_bench_hands_the_file_to_the_benchmark(monkeypatch, tmp_path):
    handed = []
    module = type(sys)("cpmoe.cli.bench.probe")
    module.run = handed.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cpmoe.cli.bench.probe", module)
    monkeypatch.setattr("cpmoe.cli.run_bench.benchmarks", lambda: {"probe": "a probe"})
    assert main(["bench", "probe", "--json", str(tmp_path / "f.json")]) == 0
    assert handed == [tmp_path / "f.json"]

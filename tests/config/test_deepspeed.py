from typing import ClassVar

import pytest
from deepspeed.runtime.config import DeepSpeedConfig as RealConfig
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from cpmoe.config import deepspeed as schema
from cpmoe.config.checks import SCHEDULERS
from cpmoe.config.errors import ConfigError
from cpmoe.config.refused import REFUSED
from cpmoe.config.settings import read_deepspeed

# Named in DeepSpeed's documentation or by its launcher, and not read by its configuration class.
NOT_READ = {"cpmoe", "data_parallel_size", "sequence_parallel_size", "mesh_param", "moe"}


class RecordingDict(dict):
    """A dict that remembers which keys somebody looked for."""

    looked_for: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.looked_for.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.looked_for.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.looked_for.add(key)
        return super().__contains__(key)

    def keys(self):
        return self


def test_every_top_level_key_that_deepspeed_reads_is_legal_or_refused():
    RealConfig(RecordingDict(train_batch_size=1))
    known = set(schema.DeepSpeedConfig.model_fields) | {path for path in REFUSED if "." not in path}
    assert RecordingDict.looked_for - known == set()
    assert known - RecordingDict.looked_for - NOT_READ == set()


@pytest.mark.parametrize(
    ("block", "real", "prefix"),
    [
        (schema.ZeroOptimization, DeepSpeedZeroConfig, "zero_optimization"),
        (
            schema.OffloadOptimizer,
            DeepSpeedZeroOffloadOptimizerConfig,
            "zero_optimization.offload_optimizer",
        ),
        (schema.OffloadParam, DeepSpeedZeroOffloadParamConfig, "zero_optimization.offload_param"),
        (schema.LeafModule, DeepSpeedZeroLeafModuleConfig, "zero_optimization.leaf_module"),
        (schema.Bf16, DeepSpeedBF16Config, "bf16"),
        (schema.ThroughputTimer, DeepSpeedThroughputTimerConfig, "timers.throughput"),
    ],
)
def test_every_key_of_a_block_is_legal_or_refused(block, real, prefix):
    inner = (path.removeprefix(f"{prefix}.") for path in REFUSED if path.startswith(f"{prefix}."))
    refused = {name for name in inner if "." not in name}
    removed = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    names = {field.alias or name for name, field in real.model_fields.items()}
    assert set(block.model_fields) | refused - removed == names
    defaults = {name: field.default for name, field in block.model_fields.items()}
    for name, field in real.model_fields.items():
        key = field.alias or name
        if key in defaults and isinstance(field.default, (bool, int, float)) and key not in CHOSEN:
            assert defaults[key] == field.default, key


# Sizes that mean "no limit": the largest integers of two languages.
CHOSEN = {"stage3_model_persistence_threshold"}


def test_monitor_blocks_are_those_of_deepspeed():
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig

    pairs = {
        schema.TensorBoard: TensorBoardConfig,
        schema.CsvMonitor: CSVConfig,
        schema.Wandb: WandbConfig,
        schema.Comet: CometConfig,
    }
    for block, real in pairs.items():
        assert set(block.model_fields) == set(real.model_fields)


def test_flops_profiler_is_that_of_deepspeed():
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig

    assert set(schema.FlopsProfiler.model_fields) == set(vars(DeepSpeedFlopsProfilerConfig({})))


@pytest.mark.parametrize("scheduler", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_scheduler_parameters_are_those_of_deepspeed(scheduler):
    names = scheduler.__init__.__code__.co_varnames[2 : scheduler.__init__.__code__.co_argcount]
    assert set(SCHEDULERS[scheduler.__name__]) == set(names) - {"last_batch_iteration"}


def without_empty(tree):
    inner = {key: without_empty(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in inner.items() if value != {}}


@pytest.mark.parametrize("path", REFUSED)
def test_a_refused_key_says_why_and_is_dropped_where_it_is_off(files, path):
    # An unlikely value, so that none of the harmless ones is hit.
    (line,) = files.refused(json_={path: 12345})
    reason, harmless = REFUSED[path]
    assert line.startswith(f"deepspeed.json: {path} = 12345: {reason}; legal: ")
    for off in (*harmless, None, {"enabled": False}):
        assert without_empty(files.load(json_={path: off}).deepspeed) == files.load().deepspeed


@pytest.mark.parametrize("path", ["comms_logger", "fp16", "torch_autocast", "hybrid_engine"])
def test_a_refused_block_is_named_by_its_switch(files, path):
    (line,) = files.refused(json_={path: {"enabled": True}})
    assert line.startswith(f"deepspeed.json: {path}.enabled = true: ")


@pytest.mark.parametrize("path", ["managed_gradient_accumulation", "zero_optimization.compute_grad_norm"])
def test_false_is_no_harmless_value_where_true_is_the_default(files, path):
    (line,) = files.refused(json_={path: False})
    assert line.endswith("; legal: true, or leave it out")


def test_the_reason_against_the_comms_logger_is_told(files):
    (line,) = files.refused(json_={"comms_logger.enabled": True})
    assert "destroys the overlap" in line


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("gradient_cliping", "gradient_clipping"),
        ("train_microbatch_size_per_gpu", "train_micro_batch_size_per_gpu"),
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.stge", "stage"),
        ("zero_optimization.prefetch_bucket_size", "stage3_prefetch_bucket_size"),
        ("zero_optimization.offload_optimizer.devise", "device"),
        ("bf16.enable", "enabled"),
        ("tensorboard.output_dir", "output_path"),
        ("csv_monitor.jobname", "job_name"),
        ("wandb.projct", "project"),
        ("flops_profiler.profile_steps", "profile_step"),
        ("optimizer.parms", "params"),
        ("optimizer.params.learning_rate", ""),
        ("cpmoe.context_parallel", "context_parallel_size"),
        ("cpmoe.attention.layot", "layout"),
        ("cpmoe.communication.rings", "ring"),
    ],
)
def test_an_unknown_key_names_the_nearest(files, path, nearest):
    (line,) = files.refused(json_={path: 3})
    hint = f', did you mean "{nearest}"?' if nearest else ""
    assert line.startswith(f"deepspeed.json: {path} = 3: unknown key{hint}; legal: ")


@pytest.mark.parametrize("value", [True, 1.5, "1", -1, 4])
def test_the_stage_is_a_small_integer(files, value):
    (line,) = files.refused(json_={"zero_optimization.stage": value})
    assert line.startswith("deepspeed.json: zero_optimization.stage = ")
    assert line.endswith("; legal: integers >= 0 and <= 3")


@pytest.mark.parametrize("order", [["ep", "cp"], ["ep", "cp", "cp"], ["ep", "cp", "dp", "tp"]])
def test_the_rank_order_is_a_permutation(files, order):
    (line,) = files.refused(json_={"cpmoe.rank_order": order})
    assert line.startswith("deepspeed.json: cpmoe.rank_order = [")
    assert "must name each axis once; legal: orders of " in line


def test_group_options_are_those_given_over_the_defaults(files):
    given = {"ring": {"max_ctas": 4}, "expert": {"is_high_priority_stream": False}, "meta": {}}
    options = files.load(json_={"cpmoe.communication": given}).cpmoe.communication.options()
    assert options["ring"] == {"is_high_priority_stream": True, "max_ctas": 4}
    assert options["expert"] == {"is_high_priority_stream": False, "max_ctas": 16}
    default = files.load().cpmoe.communication.options()
    beside = {kind for kind, values in default.items() if values["is_high_priority_stream"]}
    # What runs beside computation, and nothing that the optimizer waits for.
    assert beside == set(default) - {"replica", "world"}
    assert default["meta"]["max_ctas"] < default["ring"]["max_ctas"] < default["expert"]["max_ctas"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bf16": {"enabled": true}, "bf16": {}}', "bf16: is given twice in one block"),
        ('{"a": }', "line 1 column 7: is not JSON: Expecting value"),
        ('{"gradient_clipping": NaN}', 'a number = "NaN": must be finite'),
        ("[" * 100_000, "the text: is nested too deeply"),
        ("[]", "the file = []: must hold a block of settings"),
    ],
)
def test_a_file_that_is_no_json(files, text, message):
    files.json.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_deepspeed(files.json)
    assert str(error.value) == f"{files.json}: {message}"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^--deepspeed_config = .+: no such file or directory; legal: a file"
    ):
        read_deepspeed(tmp_path / "none.json")

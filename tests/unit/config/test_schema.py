"""The tables equal deepspeed 0.19.8's own classes, constants and signatures, so that they cannot drift.

The only tests of this folder that import DeepSpeed besides test_config_runs.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import pytest

from bigtrain.config.schema import MISSING, Key
from bigtrain.config.schema_core import (
    BF16,
    FP16,
    NEVER_READ,
    OPTIMIZERS,
    REMOVED_KEYS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
)
from bigtrain.config.schema_sections import (
    ACTIVATION_CHECKPOINTING,
    AIO,
    AUTOTUNING,
    CHECKPOINT,
    COMMS_LOGGER,
    COMPILE,
    DATA_EFFICIENCY,
    EXPERT_PARALLEL,
    FLOPS_PROFILER,
    HYBRID_ENGINE,
    MONITORS,
    PIPELINE,
    ROOT,
    TENSOR_PARALLEL,
    TIMERS,
    WEIGHT_QUANTIZATION,
)
from bigtrain.config.schema_zero import LEAF_MODULE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZENFLOW, ZERO_KEYS

pytest.importorskip("deepspeed")


def models() -> list[tuple[str, Any, dict[str, Key]]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return [
        ("zero_optimization", DeepSpeedZeroConfig, ZERO_KEYS),
        ("offload_param", DeepSpeedZeroOffloadParamConfig, OFFLOAD_PARAM),
        ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig, OFFLOAD_OPTIMIZER),
        ("zenflow", ZenFlowConfig, ZENFLOW),
        ("leaf_module", DeepSpeedZeroLeafModuleConfig, LEAF_MODULE),
        ("bf16", DeepSpeedBF16Config, BF16),
        ("fp16", DeepSpeedFP16Config, FP16),
        ("comms_logger", CommsLoggerConfig, COMMS_LOGGER),
        ("tensorboard", TensorBoardConfig, dict(MONITORS["tensorboard"].keys)),
        ("csv_monitor", CSVConfig, dict(MONITORS["csv_monitor"].keys)),
        ("wandb", WandbConfig, dict(MONITORS["wandb"].keys)),
        ("comet", CometConfig, dict(MONITORS["comet"].keys)),
        ("compile", CompileConfig, COMPILE),
        ("tensor_parallel", TPTrainingConfig, TENSOR_PARALLEL),
        ("tensor_parallel.tensor_parallel", TPConfig, dict(TENSOR_PARALLEL["tensor_parallel"].keys)),
        ("hybrid_engine", HybridEngineConfig, HYBRID_ENGINE),
        ("weight_quantization", WeightQuantConfig, WEIGHT_QUANTIZATION),
        ("timers.throughput", DeepSpeedThroughputTimerConfig, dict(TIMERS["throughput"].keys)),
    ]


def bounds(info: Any) -> dict[str, float]:
    names = {"ge": "least", "gt": "above", "le": "most", "lt": "below"}
    return {names[n]: getattr(m, n) for m in info.metadata for n in names if getattr(m, n, None) is not None}


@pytest.mark.parametrize("index", range(18))
def test_section_equals_its_pydantic_class(index):
    name, model, keys = models()[index]
    spelled = {n: k for n, k in keys.items() if not k.refused}
    # Our canonical name is the documented one: the alias where there is one.
    theirs = {(f.alias or n): (n, f) for n, f in model.model_fields.items()}
    ours = {(k.also if k.also and n not in theirs else n): k for n, k in spelled.items()}
    assert set(theirs) == set(ours), name
    for key_name, (field_name, info) in theirs.items():
        key = ours[key_name]
        if info.alias and info.alias != field_name:
            assert field_name in (key.also, *spelled), f"{name}.{key_name} also goes by {field_name}"
        extra = info.json_schema_extra
        deprecated = bool(isinstance(extra, dict) and extra.get("deprecated"))
        assert deprecated == bool(key.deprecated) or key_name == "steps_per_epoch", f"{name}.{key_name} deprecated"
        check_default(name, key_name, key, info)
        for bound, value in bounds(info).items():
            # Ours may be stricter, never looser.
            assert getattr(key, bound) is not None and getattr(key, bound) == value, f"{name}.{key_name} {bound}"


def check_default(name: str, key_name: str, key: Key, info: Any) -> None:
    default = info.get_default(call_default_factory=True)
    default = default.value if isinstance(default, Enum) else default
    if key.kind == "section" or key.default is MISSING or (key.kind == "any" and not key.values):
        return
    assert default == key.default, f"{name}.{key_name}: DeepSpeed {default!r}, table {key.default!r}"


class Recorder(dict):
    """A dict that remembers which keys it was asked for."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.asked: set[str] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self  # `x in d.keys()` then asks the recorder too

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


def test_top_level_keys_are_those_that_deepspeed_looks_up():
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Recorder({"train_batch_size": 1})
    DeepSpeedConfig(config)
    asked = config.asked - set(REMOVED_KEYS)
    # These three are looked up only with `zero_optimization: true` or an initialised process group.
    elsewhere = {"allgather_size", "data_parallel_size", "sequence_parallel_size"}
    ours = set(ROOT.keys) - set(REMOVED_KEYS) - elsewhere
    assert ours - asked == set(), "in the table, but DeepSpeed never looks"
    assert asked - ours - elsewhere == set(), "DeepSpeed looks it up, but it is not in the table"
    assert not asked & set(NEVER_READ)


def asked_in(section: str, content: dict[str, Any]) -> set[str]:
    from deepspeed.runtime.config import DeepSpeedConfig

    inner = Recorder(content)
    DeepSpeedConfig({"train_batch_size": 1, section: inner})
    return inner.asked


@pytest.mark.parametrize(
    ("section", "content", "table", "not_asked"),
    [
        ("activation_checkpointing", {}, ACTIVATION_CHECKPOINTING, set()),
        ("flops_profiler", {}, FLOPS_PROFILER, set()),
        ("aio", {}, AIO, {"thread_count"}),
        ("checkpoint", {}, CHECKPOINT, set()),
        ("data_types", {}, dict(ROOT.keys["data_types"].keys), set()),
        ("torch_autocast", {}, dict(ROOT.keys["torch_autocast"].keys), set()),
        ("expert_parallel", {"enabled": True}, EXPERT_PARALLEL, set()),
        ("autotuning", {}, AUTOTUNING, set()),
        ("data_efficiency", {}, DATA_EFFICIENCY, set()),
        ("optimizer", {"type": "AdamW"}, dict(ROOT.keys["optimizer"].keys), set()),
        ("scheduler", {"type": "WarmupLR"}, dict(ROOT.keys["scheduler"].keys), set()),
        ("timers", {}, TIMERS, set()),
    ],
)
def test_plain_lookup_sections(section, content, table, not_asked):
    asked = asked_in(section, content)
    assert asked <= set(table), f"DeepSpeed looks up {asked - set(table)}"
    assert set(table) - asked == not_asked


def test_pipeline_defaults():
    from deepspeed.runtime.config import get_pipeline_config

    assert set(get_pipeline_config({})) | {"use_reentrant"} == set(PIPELINE)


def test_optimizers():
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    def takes(*classes: Any) -> set[str]:
        found = {p for c in classes for p in inspect.signature(c.__init__).parameters}
        return found - {"self", "params", "model_params", "adamw_mode"}

    assert set(OPTIMIZERS) == set(DEEPSPEED_OPTIMIZERS)
    popped = {"adam_w_mode", "torch_adam", "fp32_optimizer_states"}
    ours = {n: {k for k, row in key.keys.items() if not row.refused} for n, key in OPTIMIZERS.items()}
    # torch's own arguments reach it through torch_adam; two of them are in the table.
    assert ours["adamw"] == ours["adam"] == takes(FusedAdam, DeepSpeedCPUAdam) | popped | {"foreach", "fused"}
    assert ours["lamb"] == takes(FusedLamb) - {"max_grad_norm"}
    assert ours["lion"] == takes(FusedLion, DeepSpeedCPULion)
    assert ours["adagrad"] >= takes(DeepSpeedCPUAdagrad)
    halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"}
    assert ours["muon"] == halves | popped
    torch_names = {n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)} - {"Optimizer"}
    assert set(TORCH_OPTIMIZERS) == torch_names


def test_schedulers():
    import torch.optim.lr_scheduler as torch_schedules
    from deepspeed.runtime import lr_schedules

    assert set(SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, key in SCHEDULERS.items():
        parameters = inspect.signature(getattr(lr_schedules, name).__init__).parameters
        theirs = {n: p for n, p in parameters.items() if n not in ("self", "optimizer")}
        assert set(theirs) == set(key.keys), name
        required = {n for n, p in theirs.items() if p.default is inspect.Parameter.empty}
        assert required == {n for n, k in key.keys.items() if k.default is MISSING}, name
    for name in TORCH_SCHEDULERS:
        assert hasattr(torch_schedules, name)


def test_removed_keys():
    from deepspeed.runtime import config

    assert set(REMOVED_KEYS) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed = {n for n, k in ZERO_KEYS.items() if k.refused}
    assert removed == set(config._REMOVED_ZERO_CONFIG_KEYS)


def test_checkpoint_values():
    from deepspeed.runtime.constants import CHECKPOINT_TAG_VALIDATION_MODES, GRADIENT_ALLREDUCE_OP_SUPPORTED

    assert {v.upper() for v in CHECKPOINT["tag_validation"].values} == set(CHECKPOINT_TAG_VALIDATION_MODES)
    assert set(ROOT.keys["gradient_allreduce_op"].values) == set(GRADIENT_ALLREDUCE_OP_SUPPORTED)


def test_strict_sections_are_those_deepspeed_refuses_extras_in():
    from deepspeed.runtime.config import DeepSpeedConfig

    for name, key in ROOT.keys.items():
        if key.kind != "section" or name in ("optimizer", "scheduler", "bfloat16"):
            continue
        try:
            DeepSpeedConfig({"train_batch_size": 1, name: {"surely_not_a_key": 1}})
            refused = False
        except Exception:
            refused = True
        assert refused == key.strict, name


def test_what_peers_ship_is_accepted_by_deepspeed_too():
    """Our errors on a shipped config are only those that DeepSpeed itself raises or silently ignores."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from tests.unit.config.peers import BROKEN

    silently_ignored = {"sequence_parallel", "optimizer.params.max_grad_norm"}  # the latter fails later, in the engine
    for name, (config, path) in BROKEN.items():
        plain = {k: v for k, v in config.items() if v != "auto"} | {"train_batch_size": 1}
        if path in silently_ignored:
            DeepSpeedConfig(plain)
            continue
        with pytest.raises(Exception, match=path.rsplit(".", 1)[-1]):
            DeepSpeedConfig(plain)
            pytest.fail(name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_defaults_in_generate_equal_deepspeed(stage):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from bigtrain.config.generate import FALLBACK

    zero = DeepSpeedZeroConfig(stage=stage)
    assert zero.reduce_bucket_size == FALLBACK["reduce_bucket_size"]
    assert zero.prefetch_bucket_size == FALLBACK["stage3_prefetch_bucket_size"]
    assert zero.param_persistence_threshold == FALLBACK["stage3_param_persistence_threshold"]

import importlib.util
from itertools import permutations, product
from typing import get_args

import pytest

from cpmoe.config.checks import LACKING, check_grid, check_nodes, shard_chunks
from cpmoe.config.deepspeed import AttentionConfig, CpmoeConfig, ExpertsConfig
from cpmoe.config.recipe import Recipe
from cpmoe.config.validation import parse
from cpmoe.parallel.grid import AXES, RankGrid, divisors
from tests.config.support import RECIPE, changed


@pytest.mark.parametrize("order", list(permutations(AXES)))
def test_the_grid_is_refused_exactly_where_it_can_not_be_built(order):
    recipe = parse(Recipe, changed(RECIPE, {"model.num_experts": 5040}))
    for world in range(1, 17):
        for cp in range(1, 17):
            for ep in range(1, 11):
                cpmoe = CpmoeConfig(context_parallel_size=cp, expert_parallel_size=ep, rank_order=order)
                try:
                    RankGrid(world, cp, ep, order)
                    legal = True
                except ValueError:
                    legal = False
                assert legal == (list(check_grid(cpmoe, recipe, world)) == []), (world, cp, ep)


@pytest.mark.parametrize("order", list(permutations(AXES)))
def test_nodes_are_refused_exactly_where_expert_groups_do_not_part_evenly(order):
    for world in (1, 6, 8, 12):
        for cp, ep, nodes in product(divisors(world), divisors(world), range(1, world + 2)):
            experts = ExpertsConfig(dispatcher="hierarchical", ranks_per_node=nodes)
            cpmoe = CpmoeConfig(
                context_parallel_size=cp, expert_parallel_size=ep, rank_order=order, experts=experts
            )
            try:
                RankGrid(world, cp, ep, order)
            except ValueError:
                continue
            try:
                RankGrid(world, cp, ep, order, ranks_per_node=nodes)
                legal = True
            except ValueError:
                legal = False
            assert legal == (list(check_nodes(cpmoe, world)) == []), (world, cp, ep, nodes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cpmoe.experts.dispatcher=hierarchical", "cpmoe.experts.ranks_per_node=3"],
            "cpmoe.experts.ranks_per_node = 3: nodes must divide the world size 4 and have equal parts of "
            "every expert group (expert_parallel_size 2); legal: 1, 2, 4",
        ),
        (
            ["cpmoe.experts.dispatcher=hierarchical"],
            'cpmoe.experts.dispatcher = "hierarchical": needs cpmoe.experts.ranks_per_node; '
            "legal: alltoall, dedup, allgather, or give it",
        ),
        (
            ["cpmoe.experts.max_rows_per_rank=1"],
            "cpmoe.experts.max_rows_per_rank = 1: must be at least expert_parallel_size 2: a row from each "
            "rank; legal: integers >= 2",
        ),
        (
            ["cpmoe.experts.ranks_per_node=2"],
            "cpmoe.experts.ranks_per_node = 2: is for dispatcher hierarchical alone; "
            "legal: none, or that dispatcher",
        ),
        (
            ["cpmoe.context_parallel_size=3"],
            "cpmoe.context_parallel_size = 3: must divide the world size 4; legal: 1, 2, 4",
        ),
        (
            ["cpmoe.expert_parallel_size=3"],
            "cpmoe.expert_parallel_size = 3: must divide the world size 4 and model.num_experts 8; "
            "legal: 1, 2, 4",
        ),
        (
            ["cpmoe.expert_parallel_size=4", "model.num_experts=6"],
            "cpmoe.expert_parallel_size = 4: must divide the world size 4 and model.num_experts 6; "
            "legal: 1, 2",
        ),
        (
            ["cpmoe.expert_parallel_size=4", "cpmoe.rank_order=[cp, ep, dp]"],
            'cpmoe.rank_order = ["cp", "ep", "dp"]: expert groups of 4 ranks, one in 2 (CP lies inside), '
            'do not tile 4 ranks; legal: "ep" first or last, or an expert_parallel_size of 1, 2',
        ),
        (
            ["data.seq_len=3"],
            "data.seq_len = 3: is shorter than the shard grid: zigzag cuts a sequence into 4 chunks at CP 2; "
            "legal: integers >= 4",
        ),
        (
            ["data.seq_len=3", "cpmoe.attention.layout=contiguous", "cpmoe.context_parallel_size=4"],
            "data.seq_len = 3: is shorter than the shard grid: contiguous cuts a sequence into 4 chunks "
            "at CP 4; legal: integers >= 4",
        ),
        (
            ["cpmoe.attention.ulysses_size=4", "cpmoe.context_parallel_size=2"],
            "cpmoe.attention.ulysses_size = 4: must divide context_parallel_size 2 and "
            "model.num_attention_heads 4; legal: 1, 2",
        ),
        (
            ["model.moe_intermediate_size=30", "cpmoe.experts.backend=grouped_mm"],
            "model.moe_intermediate_size = 30: must be a multiple of 4 for cpmoe.experts.backend "
            '"grouped_mm"; '
            "legal: multiples of 4, or backend auto, triton, loop",
        ),
    ],
)
def test_sizes_that_do_not_fit_each_other(files, overrides, message):
    assert files.refused(overrides=overrides) == [f"command line: {message}"]


@pytest.mark.parametrize(
    ("overrides", "backend", "message"),
    [
        (["model.attn_logit_softcapping=30.0"], "sdpa", "model.attn_logit_softcapping 30.0; legal: "),
        (["model.attention_dropout=0.1"], "sdpa", "model.attention_dropout 0.1; legal: "),
        (["model.attention_dropout=0.1"], "flash", "model.attention_dropout 0.1; legal: "),
        (["model.v_head_dim=8"], "sdpa", "model.v_head_dim 8; legal: "),
        (["model.v_head_dim=8"], "flash", "model.v_head_dim 8; legal: "),
    ],
)
def test_scores_that_a_backend_does_not_compute(files, overrides, backend, message):
    (line,) = files.refused(overrides=[*overrides, f"cpmoe.attention.backend={backend}"])
    assert line.startswith(
        f'command line: cpmoe.attention.backend = "{backend}": does not compute {message}auto, reference, '
    )
    assert files.load(overrides=[*overrides, "cpmoe.attention.backend=triton"])


def test_what_backends_lack_is_what_they_refuse(monkeypatch):
    """Of inputs that each would take otherwise: on a GPU that all of them support."""
    import torch

    from cpmoe.attention.blocks import _BACKENDS, flash
    from cpmoe.attention.blocks.triton import backend as triton
    from cpmoe.attention.dropout import Dropout
    from cpmoe.attention.scores import Scores

    monkeypatch.setattr(flash, "_missing", lambda: None)
    monkeypatch.setattr(triton, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "no_kernels", lambda device: None)
    q = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    plain, names = Scores(0.125), torch.zeros(2, 1, 1)
    asked = {
        "attn_logit_softcapping": (q, Scores(0.125, softcap=30.0)),
        "attention_dropout": (q, Scores(0.125, dropout=Dropout(0.1, names, names))),
        "v_head_dim": (q[..., :32], plain),
    }
    for name, blocks in _BACKENDS.items():
        assert blocks.unsupported(q, q, q, plain) is None, name
        refused = {field for field, (v, scores) in asked.items() if blocks.unsupported(q, q, v, scores)}
        assert refused == set(LACKING.get(name, ())), name


def test_the_shortest_sequence_and_one_that_needs_padding_are_legal(files):
    assert files.load({"data.seq_len": 4}).batch.padded_seq_len == 4
    ring = {"cpmoe.context_parallel_size": 4, "cpmoe.coschedule": {"policy": "serial"}}
    assert files.load({"data.seq_len": 2999}, ring).batch.padded_seq_len == 3000


@pytest.mark.parametrize("layout", get_args(AttentionConfig.model_fields["layout"].annotation))
@pytest.mark.parametrize(("cp", "ulysses"), [(1, 1), (2, 1), (4, 1), (2, 2), (6, 2), (6, 3)])
def test_chunks_are_those_of_attention(layout, cp, ulysses):
    from cpmoe.attention.layout import padded_length

    attention = {"layout": layout, "ulysses_size": ulysses}
    cpmoe = CpmoeConfig.model_validate({"context_parallel_size": cp, "attention": attention})
    assert shard_chunks(cpmoe) == padded_length(1, cp, 1, layout, ulysses)


ZERO = "zero_optimization"
REFUSED = [
    (
        {f"{ZERO}.stage": 1, f"{ZERO}.reduce_scatter": False},
        f"{ZERO}.reduce_scatter = false: stage 1 with experts needs it; legal: true",
    ),
    (
        {f"{ZERO}.stage": 2, f"{ZERO}.reduce_scatter": False},
        f"{ZERO}.reduce_scatter = false: stage 2 with experts needs it; legal: true",
    ),
    (
        {f"{ZERO}.stage": 2, f"{ZERO}.contiguous_gradients": False},
        f"{ZERO}.contiguous_gradients = false: stage 2 with experts needs it; legal: true",
    ),
    (
        {f"{ZERO}.overlap_comm": True, f"{ZERO}.use_multi_rank_bucket_allreduce": False},
        f"{ZERO}.use_multi_rank_bucket_allreduce = false: with overlap_comm it waits for the whole device "
        "once per bucket; legal: true, or overlap_comm false",
    ),
    (
        {f"{ZERO}.offload_optimizer.device": "cpu"},
        f'{ZERO}.offload_optimizer.device = "cpu": is measured at stages 2 and 3, not at stage 1; '
        'legal: "none", or stage 2 or 3',
    ),
    (
        {f"{ZERO}.stage": 2, f"{ZERO}.offload_param.device": "cpu"},
        f'{ZERO}.offload_param.device = "cpu": parameters are partitioned at stage 3 only, not at stage 2; '
        'legal: "none", or stage 3',
    ),
    (
        {f"{ZERO}.stage": 3, f"{ZERO}.offload_param.device": "nvme"},
        f'{ZERO}.offload_param.device = "nvme": is none of the legal choices; legal: "none", "cpu"',
    ),
    (
        {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"},
        'data_types.grad_accum_dtype = "fp32": with bf16 at stage 1 it selects an optimizer not measured '
        "with expert groups; legal: leave it out, or stage 2 or 3",
    ),
    (
        {f"{ZERO}.stage": 0, "bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"},
        'data_types.grad_accum_dtype = "fp32": DeepSpeed has no optimizer for it with bf16 at stage 0; '
        "legal: leave it out, or stage 2 or 3",
    ),
    (
        {"communication_data_type": "bf16"},
        'communication_data_type = "bf16": the run is in float32; legal: "fp32", or bf16.enabled true',
    ),
    (
        {"communication_data_type": "fp16"},
        'communication_data_type = "fp16": is none of the legal choices; legal: "fp32", "bf16"',
    ),
    (
        {"optimizer.type": "Lamb"},
        'optimizer.type = "Lamb": is none of the legal choices; legal: "AdamW", "Adam", "SGD"',
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
        "optimizer.params.momentum = 0.9: unknown key; legal: betas, eps, lr, weight_decay",
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.95]}}},
        "optimizer.params.betas = [0.9, 0.95]: unknown key; legal: lr, momentum, weight_decay",
    ),
    (
        {"scheduler.type": "OneCycle"},
        'scheduler.type = "OneCycle": is none of the legal choices; '
        'legal: "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"',
    ),
    (
        {"scheduler.type": "WarmupCosineLR"},
        "scheduler.params.total_num_steps: WarmupCosineLR needs it; "
        'legal: integers >= 1, or "auto" for train.steps',
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_ratio": 0.1}}},
        'scheduler.params.warmup_min_ratio = 0.1: unknown key, did you mean "warmup_min_lr"?; '
        "legal: warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        "scheduler.params.warmup_num_steps = 0: must be greater than or equal to 1; legal: integers >= 1",
    ),
]


@pytest.mark.parametrize(("json_", "message"), REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_a_choice_that_is_wrong_with_experts(files, json_, message):
    assert files.refused(json_=json_) == [f"deepspeed.json: {message}"]


@pytest.mark.parametrize(
    "json_",
    [
        {f"{ZERO}.stage": 3, f"{ZERO}.reduce_scatter": False},
        {f"{ZERO}.stage": 1, f"{ZERO}.contiguous_gradients": False},
        {
            f"{ZERO}.stage": 3,
            f"{ZERO}.offload_param.device": "cpu",
            f"{ZERO}.offload_optimizer.device": "cpu",
        },
        {f"{ZERO}.stage": 1, f"{ZERO}.offload_optimizer.device": "none"},
        {f"{ZERO}.stage": 2, "bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"},
    ],
)
def test_choices_that_are_right(files, json_):
    files.load(json_=json_)


@pytest.mark.parametrize(("block", "package"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_a_monitor_without_its_package(files, block, package):
    if importlib.util.find_spec(package):
        files.load(json_={f"{block}.enabled": True})
        pytest.skip(f"{package} is installed, and accepted")
    assert files.refused(json_={f"{block}.enabled": True}) == [
        f"deepspeed.json: {block}.enabled = true: needs the package {package}, which is not installed; "
        f"legal: false, or pip install {package}"
    ]


def test_one_hardware_queue_is_refused(files):
    assert files.refused(environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == [
        "environment: CUDA_DEVICE_MAX_CONNECTIONS = 1: one hardware queue serialises the ring and the expert "
        "traffic with computation; legal: unset, or 8 and more"
    ]
    files.load(environ={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})


def test_problems_of_both_files_are_told_together(files):
    lines = files.refused(
        {"data.seq_len": 3, "train.global_batch_size": 3},
        {f"{ZERO}.reduce_scatter": False, "cpmoe.expert_parallel_size": 3},
    )
    assert [line.split(" = ")[0] for line in lines] == [
        "deepspeed.json: cpmoe.expert_parallel_size",
        "recipe.yaml: data.seq_len",
        "deepspeed.json: zero_optimization.reduce_scatter",
        "recipe.yaml: train.global_batch_size",
    ]

# SPDX-License-Identifier: Apache-2.0
"""Rules of --hybrid-layer-pattern: what it implies, and what cannot go with it."""

import importlib
import sys
from types import ModuleType

import megatron.core
import pytest

from tests.support.pretrain.arguments.command_lines import EXPERTS, MOCK, parse, problems

HYBRID = MOCK.replace("--num-layers 2", "") + " --hybrid-layer-pattern"
LATENT = "--multi-latent-attention --position-embedding-type rope"
MODEL = "megatron.core.models.hybrid.hybrid_model"


@pytest.fixture
def has_hybrid_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules find the model; nothing builds it."""
    importlib.import_module("megatron.core.models")
    for name in (MODEL.rpartition(".")[0], MODEL):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_a_release_without_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODEL, None)
    (problem,) = problems(f"{HYBRID} *-*-")
    assert problem.startswith("--hybrid-layer-pattern *-*-: HybridModel needs Megatron-Core 0.18")
    assert f"with {megatron.core.__version__}: " in problem
    assert "megatron.core.models.hybrid" in problem.partition(megatron.core.__version__)[2]


@pytest.mark.usefixtures("has_hybrid_model")
def test_the_pattern_says_how_many_layers_there_are_and_which_have_experts() -> None:
    args, _ = parse(f"{HYBRID} *-*E- {EXPERTS} --num-layers 5")
    assert args.num_layers == 5 and args.moe_layer_freq == [0, 0, 0, 1, 0]
    args, _ = parse(f"{HYBRID} *-")
    assert args.num_layers == 2 and args.moe_layer_freq == 1


@pytest.mark.usefixtures("has_hybrid_model")
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "*-X*",
            "*-X*: layers can be * (attention), - (MLP), E (experts), M (Mamba); other letters",
        ),
        ("*-|*-/*-", "pipeline stages (|) and multi-token prediction (/) are not built"),
        ("*- --num-layers 3", "--num-layers 3 contradicts --hybrid-layer-pattern *-: leave it out"),
        (f"*E {EXPERTS} --moe-layer-freq [1,0]", "--moe-layer-freq 1 0 contradicts"),
        ("*E", "--hybrid-layer-pattern *E needs --num-experts"),
        (f"*- {EXPERTS}", "--num-experts needs E in --hybrid-layer-pattern *-"),
        ("*- --qk-layernorm", "--qk-layernorm: not built for HybridModel; leave it out"),
        (f"*- {LATENT}", "--multi-latent-attention: not built for HybridModel"),
        ("*- --spec torch nn", "--spec: not built for HybridModel"),
        ("*- --dry-run", "--dry-run: not built for HybridModel"),
        ("*- --use-megatron-fsdp --ckpt-format torch_dist", "use --ckpt-format fsdp_dtensor"),
        ("*M", "Mamba layers need mamba_ssm, causal_conv1d, "),
        ("*M --mamba-state-dim 64", "--mamba-state-dim 64: Mamba layers have the default sizes"),
    ],
)
def test_what_does_not_go_with_a_pattern_is_refused(flags: str, problem: str) -> None:
    assert [each for each in problems(f"{HYBRID} {flags}") if problem in each]


@pytest.mark.usefixtures("has_hybrid_model")
def test_pipeline_stages_are_refused() -> None:
    (problem,) = problems(f"{HYBRID} *-*- --pipeline-model-parallel-size 2", world_size=2)
    assert problem == "--pipeline-model-parallel-size: not built for HybridModel; leave it out"

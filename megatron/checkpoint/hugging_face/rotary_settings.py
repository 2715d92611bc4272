# SPDX-License-Identifier: Apache-2.0
"""Rules for rotary positions: their base, and how they are stretched to longer sequences.

Sources: ``modeling_rope_utils.py`` of transformers; "Llama 3" and "YaRN"
(https://arxiv.org/abs/2407.21783, https://arxiv.org/abs/2309.00071).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron.checkpoint.hugging_face.setting_rules import Arguments, Config, Problems, SettingRule


@dataclass(frozen=True)
class Stretching:
    """One way of stretching, as far as Megatron-LM has flags for it; by itself, that of Llama 3.

    There low frequencies are divided by the factor, and high ones stay.

    Attributes:
        name: its ``rope_type``.
        arguments: arguments of Megatron-LM.
        fixed: values of the settings that Megatron-LM has no flags for.
        required: those of ``fixed`` that a config must state.
    """

    name: str
    arguments: tuple[str, ...]
    fixed: Config
    required: tuple[str, ...]

    def read(self, settings: Config | None, problems: Problems) -> Arguments:
        """Return the arguments that ``rope_scaling`` means; None: positions are not stretched."""
        if settings is None:
            return {"use_rope_scaling": False}
        factor = self.factor(settings, problems)
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}

    def write(self, args: Namespace, problems: Problems) -> Config | None:
        """Return ``rope_scaling``, or None if positions are not stretched."""
        if not args.use_rope_scaling:
            return None
        return {"rope_type": self.name, "factor": float(args.rope_scaling_factor), **self.fixed}

    def factor(self, settings: Config, problems: Problems) -> float:
        """Return the factor, and check that all other settings are those of ``fixed``."""
        factor = settings.pop("factor", None)
        if factor is None:
            problems.append("rope_scaling without a factor")
        for name in self.required:
            if name not in settings:
                problems.append(f"rope_scaling without {name}")
        for name, value in settings.items():
            if name not in self.fixed:
                problems.append(f"rope_scaling has {name} {value}, which Megatron-LM does not know")
            elif value != self.fixed[name]:
                problems.append(
                    f"rope_scaling has {name} {value}: Megatron-LM has {self.fixed[name]} and no"
                    " flag for it"
                )
        return float(factor or 1.0)


class YarnStretching(Stretching):
    """Frequencies are interpolated, and attention scores are scaled by ``mscale``."""

    def read(self, settings: Config | None, problems: Problems) -> Arguments:
        """Return ``rope_type``, the factor and both scales."""
        if settings is None:
            return {"rope_type": "rope"}
        scale = settings.pop("mscale", None)
        scale_of_all = settings.pop("mscale_all_dim", None)
        if scale_of_all and not scale:
            problems.append(
                "rope_scaling with mscale_all_dim but without mscale: the counterpart uses both or"
                " none"
            )
        if not scale_of_all:
            scale = None  # transformers ignores mscale unless there are both
        return {
            "rope_type": "yarn",
            "rotary_scaling_factor": self.factor(settings, problems),
            "mscale": float(scale or 1.0),
            "mscale_all_dim": float(scale_of_all or 0.0),
        }

    def write(self, args: Namespace, problems: Problems) -> Config | None:
        """Return ``rope_scaling`` of type ``yarn``."""
        if args.rope_type == "rope":
            if args.rotary_scaling_factor > 1 and args.mscale_all_dim:
                problems.append(
                    "rotary_scaling_factor and mscale_all_dim change the scores although rope_type"
                    " is rope"
                )
            return None
        settings = {"rope_type": "yarn", "factor": float(args.rotary_scaling_factor), **self.fixed}
        del settings["truncate"]  # True, which is the default
        if args.mscale_all_dim:
            settings |= {"mscale": args.mscale, "mscale_all_dim": args.mscale_all_dim}
        elif args.mscale != 1:
            problems.append(
                f"mscale {args.mscale} without mscale_all_dim, which transformers would not use"
            )
        return settings


LLAMA3 = Stretching(
    name="llama3",
    arguments=("use_rope_scaling", "rope_scaling_factor"),
    fixed={
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    required=("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
YARN = YarnStretching(
    name="yarn",
    arguments=("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    fixed={
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
        "truncate": True,
    },
    required=("original_max_position_embeddings",),
)


def rotary(theta: float, stretching: Stretching) -> SettingRule:
    """Make the rule of rotary positions.

    Args:
        theta: the base if the config does not state it.
        stretching: the one way of stretching that the counterpart in Megatron-Core has.
    """

    def read(config: Config, problems: Problems) -> Arguments:
        # Releases of transformers before 5 have the base outside the settings of the stretching.
        settings = {
            "rope_theta": config.get("rope_theta"),
            "partial_rotary_factor": config.get("partial_rotary_factor"),
        }
        for table in ("rope_scaling", "rope_parameters"):
            for key, value in (config.get(table) or {}).items():
                if value is not None:
                    settings[key] = value
        base = settings.pop("rope_theta") or theta
        if base != int(base):
            problems.append(f"rope_theta {base}: --rotary-base takes whole numbers")
        if settings.pop("partial_rotary_factor") not in (None, 1.0):
            problems.append(
                "partial_rotary_factor: Megatron-Core's counterpart rotates whole heads"
            )
        older_name = settings.pop("type", "default")
        name = settings.pop("rope_type", older_name)
        if name not in ("default", stretching.name):
            problems.append(
                f"rope_scaling of type {name}: the counterpart has {stretching.name} only"
            )
            return {}
        if name == "default":
            stretched = stretching.read(None, problems)
        else:
            stretched = stretching.read(settings, problems)
        return {"rotary_base": int(base)} | stretched

    def write(args: Namespace, problems: Problems) -> Config:
        return {
            "rope_theta": float(args.rotary_base),
            "rope_scaling": stretching.write(args, problems),
        }

    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return SettingRule(keys, ("rotary_base", *stretching.arguments), read, write)

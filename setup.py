# SPDX-License-Identifier: Apache-2.0
"""Packaging.

`megatron` is a namespace that the megatron-core wheel shares, so only our own packages in it are
listed.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
TYPED = ("megatron.fsdp", "megatron.checkpoint", "megatron_fsdp")


def read_version() -> str:
    """Read the version from megatron/fsdp/__init__.py, without importing torch."""
    text = (ROOT / "megatron" / "fsdp" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError('megatron/fsdp/__init__.py expects a line __version__ = "X.Y.Z"')
    return match.group(1)


setup(
    name="open-megatron-fsdp",  # the name megatron-fsdp belongs to the published package
    version=read_version(),
    description=(
        "Fully sharded data parallel training for PyTorch and Megatron-Core, written from scratch"
    ),
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # The mapping looks needless, but with it an editable install is a plain path entry instead of
    # an import hook: the hook lists packages at install time, so a package added to megatron/ later
    # would not be found.
    package_dir={"": "."},
    packages=find_namespace_packages(
        include=[
            *(
                f"megatron.{part}{below}"
                for part in (
                    *("fsdp", "huggingface", "mcore_adapter", "checkpoint", "pretrain", "planning"),
                )
                for below in ("", ".*")
            ),
            "megatron_fsdp",
            "megatron_fsdp.*",
        ]
    ),
    # Type checkers read the annotations of these packages (PEP 561).
    package_data={
        name: ["py.typed"] for name in ("megatron.fsdp", "megatron.checkpoint", "megatron_fsdp")
    },
    install_requires=[
        "torch>=2.10,<2.16",
        "megatron-core>=0.16.0,<0.21",
        "numpy",
        "zlib-ng",  # checksums as fast as memory; zlib is used where it is missing
        "fsspec>=2024.2",  # the packages of its file systems (s3fs, gcsfs) are optional
        "click",
        "tqdm",
        "tensorboard",
        "psutil",
        "pyyaml",
        "einops",  # Megatron-Core does not declare it, and needs it for several optimizer instances
    ],
    entry_points={
        "console_scripts": ["checkpoint-inspector = megatron.checkpoint.commands.command_line:main"]
    },
    extras_require={
        "hf": ["transformers"],
        "huggingface": ["transformers>=5.23", "accelerate>=1.15"],  # megatron_fsdp.huggingface
        "transformers": ["transformers"],  # which brings tokenizers
        "sentencepiece": ["sentencepiece"],
        "tiktoken": ["tiktoken"],
        "plot": ["matplotlib"],
        "wandb": ["wandb"],
        "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.30,<2"],
        "lint": ["ruff==0.17.6", "mypy==2.4.1"],
        "test": [
            "pytest>=8.2",
            "pytest-xdist>=3.8",
            "hypothesis",
            "matplotlib",
            "transformers>=5",
            "accelerate>=1.15",
            "peft",
            "torchao",  # its tensor subclasses; what it has compiled is not needed
            "sentencepiece",
            "tiktoken",
            "safetensors",
            "wandb",
        ],
    },
)

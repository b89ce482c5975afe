"""Builds the C extensions of `dataplane` and `control`; all else but the readme is in pyproject.toml.

`dataplane._copy`, the lock of the verbs backend and those of `control` need a C compiler and Python's headers.
`dataplane.backends.ucx._ucp` also needs the headers of UCX, and its libraries to link with. They come from a wheel of
the build environment (`libucx-cu12` or `libucx-cu13`, whose headers are the same), or from the UCX installed under the
folder that the environment variable `UCX_HOME` names (with `include/ucp/api/ucp.h` and `lib/libucp.so.0`). What is
built goes with each: it asks the loader for `libucp.so.0` by its name and carries no path. Which file that is, is
decided at run time (`dataplane.configure(ucx_library=...)`).
"""

import importlib.util
import os
import re
import sys
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError, PlatformError

CONTROL = "src/skipper/control"
DATAPLANE = "src/skipper/dataplane"
FLAGS = ["-O3", "-Wno-unused-function"]


class BuildExtensions(build_ext):
    """`build_ext` that says in one sentence that a compiler is missing, and leaves no path of this machine behind."""

    def run(self) -> None:
        """Compile, or say in one sentence what is missing and stop."""
        try:
            super().run()
        except (CCompilerError, CompileError, ExecError, LinkError, PlatformError) as error:
            sys.exit(
                "error: a part of Skipper is compiled: that needs a C compiler and Python's headers "
                f"(Debian: apt-get install gcc libc6-dev python3-dev). The compiler said: {error}"
            )

    def build_extensions(self) -> None:
        """Link without the folder of Python's own library, which a Python that is built for one hands on to modules."""
        command = self.compiler.linker_so
        self.compiler.set_executables(linker_so=[word for word in command if not word.startswith("-Wl,-rpath,")])
        super().build_extensions()


def index_readme() -> str:
    """README.md for a package index, where files of the repository are not there.

    Links to such files become their text, and pictures their description. What stands in code blocks stays.
    """
    parts = re.split(r"(^```.*?^```$)", Path("README.md").read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)", r"\1", parts[at])
    return "".join(parts) + "\nThe pages and examples that are named here are in the source repository.\n"


def find_ucx() -> Path:
    """The folder that holds UCX's `include` and `lib`."""
    named = os.environ.get("UCX_HOME")
    if named:
        home = Path(named)
    else:
        spec = importlib.util.find_spec("libucx")
        if spec is None or spec.origin is None:
            sys.exit(
                "error: Skipper's dataplane needs the headers of UCX to compile: install libucx-cu12 or libucx-cu13 "
                "(for this either will do), or name a UCX installation by UCX_HOME"
            )
        home = Path(spec.origin).parent
    for needed in ("include/ucp/api/ucp.h", "lib/libucp.so.0", "lib/libucs.so.0"):
        if not (home / needed).exists():
            sys.exit(f"error: {home} is not an installation of UCX: it has no {needed}")
    return home


def extensions() -> list[Extension]:
    """The extensions, for cythonize."""
    ucx = find_ucx()
    return [
        Extension(
            "skipper.dataplane._copy",
            [f"{DATAPLANE}/_copy.pyx"],
            include_dirs=[DATAPLANE],
            depends=[f"{DATAPLANE}/rows.h", f"{DATAPLANE}/atomics.h", f"{DATAPLANE}/sealed.h"],
            extra_compile_args=FLAGS,
        ),
        Extension("skipper.control.model._future", [f"{CONTROL}/model/_future.pyx"], extra_compile_args=FLAGS),
        Extension("skipper.control.wire._frames", [f"{CONTROL}/wire/_frames.pyx"], extra_compile_args=FLAGS),
        Extension("skipper.control.wire._plain", [f"{CONTROL}/wire/_plain.pyx"], extra_compile_args=FLAGS),
        Extension("skipper.control.wire._poller", [f"{CONTROL}/wire/_poller.pyx"], extra_compile_args=FLAGS),
        Extension(
            "skipper.dataplane.backends.verbs.lock",
            [f"{DATAPLANE}/backends/verbs/lock.pyx"],
            extra_compile_args=FLAGS,
        ),
        Extension(
            "skipper.dataplane.backends.ucx._ucp",
            [f"{DATAPLANE}/backends/ucx/_ucp.pyx"],
            include_dirs=[DATAPLANE],
            depends=[
                f"{DATAPLANE}/rows.h",
                f"{DATAPLANE}/atomics.h",
                f"{DATAPLANE}/backends/ucx/ucp_api.pxd",
                f"{DATAPLANE}/backends/ucx/ucp_guard.h",
                *glob(f"{DATAPLANE}/backends/ucx/_ucp_*.pxi"),
            ],
            library_dirs=[str(ucx / "lib")],
            # By file name: the wheel has no libucp.so for -lucp in some of its builds, and the name that ends up in
            # the extension is the library's soname either way. Its own dependencies are resolved at run time.
            extra_link_args=[
                "-l:libucp.so.0",
                "-l:libucs.so.0",
                "-Wl,--allow-shlib-undefined",
                f"-Wl,-rpath-link,{ucx / 'lib'}",
            ],
            # As system headers: what they warn about is not ours to change.
            extra_compile_args=[*FLAGS, "-isystem", str(ucx / "include")],
        ),
    ]


setup(
    long_description=index_readme(),
    long_description_content_type="text/markdown",
    ext_modules=cythonize(extensions(), language_level=3, annotate=False),
    cmdclass={"build_ext": BuildExtensions},
    options={"build_ext": {"parallel": True}},  # as many compilers as there are processors
)

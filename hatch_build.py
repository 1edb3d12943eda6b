"""Build the compiled codec into the wheel, or in place for an editable install.

Without a compiler, or without Cython, the wheel is one of Python alone, and the relay uses its pure codec.
The variable OUTBOX_RELAY_CODEC decides otherwise: `compiled` ends such a build, `pure` builds no codec.
`python hatch_build.py FOLDER` builds it into a copy of the project; CFLAGS holds further options of the compiler.
"""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("relay/engine/send/compiled_frames.pyx")
WISH = "OUTBOX_RELAY_CODEC"


class CodecHook(BuildHookInterface[BuilderConfig]):
    """Called by hatchling before it puts a wheel together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get(WISH, "")
        if wish == "pure":
            return
        root = Path(self.root)
        folder = root / SOURCE.parent if version == "editable" else root / "build/codec"
        try:
            built = build_codec(root, folder)
        except Exception as error:
            if wish == "compiled":
                raise
            self.app.display_warning(f"without the compiled codec, so the relay is slower: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(built)] = str(SOURCE.with_name(built.name))


def build_codec(root: Path, folder: Path) -> Path:
    """Build the codec of the project at `root` into a folder, and return the library."""
    target = folder / (SOURCE.stem + EXTENSION_SUFFIXES[0])
    target.unlink(missing_ok=True)  # an older one must not stay when this build fails

    from Cython.Build import cythonize  # noqa: PLC0415  (a build without them is one without the codec)
    from setuptools import Distribution, Extension  # noqa: PLC0415  (the same)
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415  (the same)

    name = ".".join(SOURCE.with_suffix("").parts)
    with TemporaryDirectory() as scratch:
        extension = Extension(name, [str(root / SOURCE)], extra_compile_args=["-O2", "-g0"])
        modules = cythonize([extension], build_dir=scratch, quiet=True)
        command = build_ext(Distribution({"name": "codec", "ext_modules": modules}))
        command.build_lib, command.build_temp = str(Path(scratch, "lib")), scratch
        command.ensure_finalized()
        command.run()
        (built,) = Path(scratch, "lib").rglob(f"{SOURCE.stem}*")
        folder.mkdir(parents=True, exist_ok=True)
        target.write_bytes(built.read_bytes())
    return target


if __name__ == "__main__":
    copy = Path(sys.argv[1])
    print(build_codec(copy, copy / SOURCE.parent))

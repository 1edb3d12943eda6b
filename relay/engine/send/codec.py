"""Which codec encodes messages: the compiled one, or the pure one if the compiled one was not built for this Python."""

from enum import StrEnum

from relay.engine.send import frames


class Codec(StrEnum):
    """The codec in use, as `relay --version` and `relay doctor` name it."""

    COMPILED = "compiled"
    PURE = "pure"


Encoder: type[frames.Encoder]
try:
    from relay.engine.send.compiled_frames import CompiledEncoder
except ImportError:
    CODEC, Encoder = Codec.PURE, frames.Encoder
else:
    CODEC, Encoder = Codec.COMPILED, CompiledEncoder

"""Which codec encodes messages: the compiled one, or the pure one where that was not built for this Python."""

from enum import StrEnum

from relay.engine.send import frames


class Codec(StrEnum):
    """What `relay --version` and `relay doctor` tell."""

    COMPILED = "compiled"
    PURE = "pure"


Encoder: type[frames.Encoder]
try:
    from relay.engine.send.compiled_frames import CompiledEncoder
except ImportError:
    CODEC, Encoder = Codec.PURE, frames.Encoder
else:
    CODEC, Encoder = Codec.COMPILED, CompiledEncoder

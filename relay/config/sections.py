"""What the models of the settings are made of."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class Takes:
    """What a key takes, in words, where its type does not say it."""

    words: str


class Section(BaseModel):
    """A table of relay.toml: immutable, an unknown key is an error, and no error repeats a value.

    A validator that raises ValueError without words is told as what the key takes, one with words in these.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )


def short(text: str) -> str:
    """Let pass what fits into a short string of AMQP."""
    if len(text.encode()) > 255:
        raise ValueError
    return text


ShortString = Annotated[str, AfterValidator(short), Takes("text of at most 255 bytes")]

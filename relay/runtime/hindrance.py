"""What keeps a part from its work: in words for the operator, and as far as a stranger may know it."""

from typing import Self

from relay.errors import ConsumerError, DeadlineError, PublicReason, UnavailableError


class Hindrance(str):
    """A reason in the words of a server, the kernel or a handler, which may name hosts, ports, users and queues.

    A probe shows `public` alone, so no change of the words changes what it shows.

    Attributes:
        public: what strangers may know: a `PublicReason`, or words of ours that name nothing.
    """

    __slots__ = ("public",)
    public: str

    def __new__(cls, words: str, public: str = PublicReason.UNNAMED) -> Self:
        hindrance = super().__new__(cls, words)
        hindrance.public = public
        return hindrance

    @classmethod
    def plain(cls, words: str) -> Self:
        """Return words of ours that name nothing, so strangers may know them as they are."""
        return cls(words, words)

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return what an error of ours says."""
        if isinstance(error, UnavailableError | DeadlineError | ConsumerError):
            return cls(str(error), error.public)
        return cls(str(error))

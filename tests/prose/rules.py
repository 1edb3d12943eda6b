"""The rules of the prose, as checks of proselint: turns that readers stumble over, and how long a sentence may be."""

import re
from collections.abc import Iterator

from proselint.checks import archaism
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckResult
from proselint.registry.checks.types import Existence, ExistenceSimple, PreferredFormsSimple

LONGEST = 25
SENTENCE = re.compile(r"\S.*?(?:[.!?][\"')]*(?=\s|$)|$)", re.DOTALL)

# An actor has a name: the relay, the broker, the consumer, the operator, the application.
NAMELESS = ("whoever", "whomever", "whosoever", "somebody", "someone", "he", "his", "him", "she", "nobody where")
PREFERRED = {
    "anew": "again",
    "beside": "next to, or: at the same time as",
    "be it": "for example, or: whether",
    "is to be": "must be, or: will be",
    "are to be": "must be, or: will be",
    "of its own": "its own, or: separate",
    "of their own": "their own, or: separate",
    "is away": "is unreachable",
    "are away": "are unreachable",
    "while that is": "while, with the name of what it is",
    "those of the rows": "the rows",
    "not any more": "no longer",
    "as far as we": "with the name of who sees it",
    "so and so": "with the number",
    "the likes of": "such as",
}
ARCHAIC: tuple[str, ...] = (
    "whence",
    "thence",
    "hither",
    "thereof",
    "thereto",
    "therein",
    "wherein",
    "whereof",
    "hitherto",
)
ARCHAIC += ("henceforth", "lest", "ere", "albeit", "oftentimes", "amongst", "whilst", "upon")


def sentences(text: str) -> Iterator[re.Match[str]]:
    return SENTENCE.finditer(text)


def words(sentence: str) -> int:
    """Return the number of words; a dash or an arrow that stands alone is no word."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def _long_sentences(text: str, check: Check) -> Iterator[CheckResult]:
    for sentence in sentences(text):
        if (count := words(sentence.group())) > LONGEST:
            start = " ".join(sentence.group().split()[:6])
            yield CheckResult(check.path, check.message.format(count, start), sentence.span(), None)


CHECKS = (
    Check(Existence(NAMELESS), path="prose.nameless", message="'{}' does not name who acts."),
    Check(PreferredFormsSimple(PREFERRED), path="prose.turn", message="Write '{}' in place of '{}'."),
    Check(Existence(ARCHAIC), path="prose.archaic", message="'{}' is archaic."),
    Check(
        ExistenceSimple(r"\b[a-z]+ none\b"), path="prose.none", message="'{}': say no, and of what, in place of 'none'."
    ),
    Check(
        ExistenceSimple(r"(?:^|[.!?:;] )of (?:the|an?|its|their) [a-z]+,? (?:the|an?|its|their)\b"),
        path="prose.fronted",
        message="'{}': begin with the subject.",
    ),
    Check(_long_sentences, path="prose.long", message=f"{{}} words, more than {LONGEST}: '{{}} ...'"),
    *archaism.__register__,
)

# The registry is one object for the whole process: it has these checks, and no others of proselint.
REGISTRY = CheckRegistry()
REGISTRY.register_many(CHECKS)


def findings(text: str) -> list[CheckResult]:
    """Return what the rules object to in a text without markup, by place."""
    found = (result for check in REGISTRY.checks for result in check.check_with_flags(text))
    return sorted(found, key=lambda each: each.span)

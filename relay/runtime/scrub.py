"""The passwords in use, which no text may show: an error, a traceback or a log event.

Every URL that becomes a setting is remembered here. `scrub` then hides its password wherever it turns up.
"""

import json
import re
from threading import Lock
from urllib.parse import quote

HIDDEN = "***"

# A password of fewer than 4 characters is hidden inside a URL only: else "a" would be hidden everywhere. One of fewer
# than 8 is hidden where it stands as a word: "test" stays in "latest".
SHORTEST_WORD, SHORTEST_PART = 4, 8
PUBLIC = frozenset({"guest"})  # the password in the default of `broker.url`
MOST_REMEMBERED = 256  # URLs and passwords; a source may give a new one each time, and each is used for a short time

URL_START = r"(?:postgres(?:ql)?|amqps?)://"
SECRETLY_NAMED = r"[^=&?\s]*(?:pass|secret|token|scram)[^=&?\s]*\s*=\s*"
QUOTED = r"'(?:[^'\\]|\\.)*'?"
IN_URL = re.compile(rf"((?:^|[?&\s]){SECRETLY_NAMED})({QUOTED}|[^&\s]*)", re.IGNORECASE)
IN_WORDS = re.compile(rf"((?:^|\s){SECRETLY_NAMED})({QUOTED}|(?:\\.|[^\s\\])*)", re.IGNORECASE)  # host=... password=...
PARAMETERS = re.compile(r"\w+=[^&=]*(?:&\w+=[^&=]*)*")


class Known:
    """The texts to hide, and what stands in their place. Any thread may add one, or hide them."""

    def __init__(self) -> None:
        self._adding = Lock()
        self._texts: dict[str, dict[str, str]] = {}  # by the secret, the one used last at the end
        self._instead: dict[str, str] = {}  # the longest first

    def add(self, secret: str, texts: dict[str, str]) -> None:
        with self._adding:
            before = self._texts.pop(secret, {})
            self._texts[secret] = {**before, **texts}
            if self._texts[secret] == before:
                return
            if len(self._texts) > MOST_REMEMBERED:
                del self._texts[next(iter(self._texts))]
            instead = {each: shown for of_one in self._texts.values() for each, shown in of_one.items()}
            self._instead = dict(sorted(instead.items(), key=lambda item: len(item[0]), reverse=True))

    def hide(self, text: str) -> str:
        # Hardly any text has one. A pattern of all that are known would take 40 ms to compile for each one more.
        instead = {each: shown for each, shown in self._instead.items() if each in text}
        if not instead:
            return text
        return re.sub("|".join(map(_anywhere_or_as_word, instead)), lambda found: instead[found[0]], text)


_known = Known()


def remember(secret: str) -> None:
    """Hide this password from now on, in each form in which it may be shown."""
    if len(secret) < SHORTEST_WORD or secret in PUBLIC:
        return
    _known.add(secret, dict.fromkeys(_forms(secret), HIDDEN))


def remember_url(text: str) -> None:
    """Hide what may be a password in this URL, or list of URLs, or libpq string, whether it can be read or not."""
    shown = redacted(text)
    if shown != text and len(text) >= SHORTEST_PART:
        _known.add(text, dict.fromkeys(_spellings(text), shown))
    for part in _parts(text):
        if bounds := _password_bounds(part):
            remember(part[slice(*bounds)])
    for _, value in _secret_parameter(text).findall(text):
        remember(value)


def scrub(text: str) -> str:
    """Return the text with `***` in place of every password that is known, or that stands in a URL."""
    text = _known.hide(text)
    if "://" in text and "@" in text:
        # Word by word: a URL ends at a space. What stands before it, such as a quotation mark, is kept.
        text = re.sub(rf"{URL_START}\S+", lambda found: redacted(found[0]), text)
    return text


def redacted(url: str) -> str:
    """Return a URL, or several with commas between, with `***` in place of every password.

    Holds for what is no proper URL too: a value that cannot be read may still hold a password.
    """
    hidden = ",".join(map(_without_password, _parts(url)))
    return _secret_parameter(url).sub(rf"\1{HIDDEN}", hidden)


def _secret_parameter(text: str) -> re.Pattern[str]:
    return IN_URL if "://" in text.partition("'")[0] else IN_WORDS


def _parts(urls: str) -> list[str]:
    return re.split(r",(?=\s*amqps?://)", urls)


def _without_password(url: str) -> str:
    bounds = _password_bounds(url)
    return f"{url[: bounds[0]]}{HIDDEN}{url[bounds[1] :]}" if bounds else url


def _password_bounds(url: str) -> tuple[int, int] | None:
    """Return where the password begins and ends, which is at the last @: one that was not encoded may hold anything."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return None
    before, question, parameters = rest.partition("?")
    # An @ in proper parameters does not belong to the password, which ended before.
    is_proper = "@" in before and PARAMETERS.fullmatch(parameters) is not None
    credentials, at, _ = (before if question and is_proper else rest).rpartition("@")
    user, colon, password = credentials.partition(":")
    if not at or not colon:
        return None
    begin = len(scheme) + len(separator) + len(user) + len(colon)
    return begin, begin + len(password)


def _forms(secret: str) -> set[str]:
    """Return a password as URLs, libpq's strings, Python and JSON write it."""
    encoded = quote(secret, safe="")
    some_encoded = quote(secret, safe="!$&'()*+,;=:")
    lower = re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), encoded)
    libpq = re.sub(r"(['\\])", r"\\\1", secret)
    plain = {secret, " ".join(secret.split()), encoded, some_encoded, lower, libpq}
    spelled = {spelling for form in plain for spelling in _spellings(form)}
    return {form for form in spelled if len(form) >= SHORTEST_WORD}


def _spellings(text: str) -> set[str]:
    """Return a text as itself, and as literals of Python and JSON have it."""
    escaped = text.encode("unicode_escape").decode("ascii")
    return {text, repr(text)[1:-1], escaped, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}


def _anywhere_or_as_word(form: str) -> str:
    pattern = re.escape(form)
    if len(form) >= SHORTEST_PART:
        return pattern
    before = r"(?<!\w)" if re.match(r"\w", form) else ""
    behind = r"(?!\w)" if re.search(r"\w\Z", form) else ""
    return f"{before}{pattern}{behind}"

"""Requests whose end two servers may see at different places, each with another request behind it."""

FIRST = "GET {path} HTTP/1.1\r\nHost: {host}\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"

# What a server does not answer twice: one that sends it on may have taken the rest for the body of the first.
SMUGGLED = {
    "length and chunks": FIRST + "Content-Length: {length}\r\n" + CHUNKED + "\r\n0\r\n\r\n{second}",
    "chunks and length": FIRST + CHUNKED + "Content-Length: {length}\r\n\r\n0\r\n\r\n{second}",
    "chunks behind a tab": FIRST + "Transfer-Encoding:\tchunked\r\nContent-Length: {length}\r\n\r\n0\r\n\r\n{second}",
    "chunks before a colon": FIRST + "Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n{second}",
    "chunks in a folded line": FIRST + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n{second}",
    "chunks by another name": FIRST + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{second}",
    "chunks of compressed": FIRST + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{second}",
    "chunks and nothing of the kind": FIRST + CHUNKED + "Transfer-Encoding: identity\r\n\r\n0\r\n\r\n{second}",
    "no chunks": FIRST + "Transfer-Encoding: identity\r\nContent-Length: 0\r\n\r\n{second}",
    "chunks in HTTP/1.0": "GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: keep-alive\r\n" + CHUNKED
    + "\r\n0\r\n\r\n{second}",
    "a chunk with a prefix": FIRST + CHUNKED + "\r\n0x0\r\n\r\n{second}",
    "a chunk below nothing": FIRST + CHUNKED + "\r\n-1\r\n\r\n{second}",
    "a chunk without end": FIRST + CHUNKED + "\r\nffffffffffffffff\r\n\r\n{second}",
    "a chunk of many digits": FIRST + CHUNKED + "\r\n" + "0" * 30 + "\r\n\r\n{second}",
    "a chunk with an extension": FIRST + CHUNKED + "\r\n0;a=b\r\n\r\n{second}",
    "an extension with a line feed": FIRST + CHUNKED + "\r\n0;a\nb\r\n\r\n{second}",
    "chunks between line feeds": FIRST + CHUNKED + "\r\n0\n\n{second}",
    "a chunk that is too long": FIRST + CHUNKED + "\r\n3\r\nabcXX0\r\n\r\n{second}",
    "headers behind the chunks": FIRST + CHUNKED + "\r\n0\r\nContent-Length: {length}\r\n\r\n{second}",
    "two lengths": FIRST + "Content-Length: 0\r\nContent-Length: {length}\r\n\r\n{second}",
    "a list of lengths": FIRST + "Content-Length: 0, {length}\r\n\r\n{second}",
    "a length with a sign": FIRST + "Content-Length: +0\r\n\r\n{second}",
    "a length below nothing": FIRST + "Content-Length: -1\r\n\r\n{second}",
    "a length in hexadecimal": FIRST + "Content-Length: 0x0\r\n\r\n{second}",
    "a length with a line in it": FIRST + "Content-Length: 0_0\r\n\r\n{second}",
    "an empty length": FIRST + "Content-Length:\r\n\r\n{second}",
    "a length in a header's value": FIRST + "X: a\rContent-Length: {length}\r\n\r\n{second}",
    "the second as the body": FIRST + "Content-Length: {length}\r\n\r\n{second}",
    "a zero byte": FIRST + "X: a\0b\r\n\r\n{second}",
    "a folded first line": "GET {path} HTTP/1.1\r\n X: a\r\nHost: {host}\r\n\r\n{second}",
    "a header without a colon": FIRST + "nothing\r\n\r\n{second}",
    "a blank before the colon": "GET {path} HTTP/1.1\r\nHost : {host}\r\n\r\n{second}",
    "no host": "GET {path} HTTP/1.1\r\n\r\n{second}",
    "two hosts": FIRST + "Host: evil.test\r\n\r\n{second}",
    "our host as the second": "GET {path} HTTP/1.1\r\nHost: evil.test\r\nHost: {host}\r\n\r\n{second}",
    "HTTP/0.9": "GET {path}\r\n\r\n{second}",
    "HTTP/1.0 that stays": "GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: keep-alive\r\n\r\n{second}",
    "tabs in the first line": "GET\t{path}\tHTTP/1.1\r\nHost: {host}\r\n\r\n{second}",
    "two blanks in the first line": "GET  {path} HTTP/1.1\r\nHost: {host}\r\n\r\n{second}",
}  # fmt: skip


def smuggled(name: str, path: str, host: str, second: str) -> bytes:
    """Return one of them, with this request behind it."""
    return SMUGGLED[name].format(path=path, host=host, second=second, length=len(second) + 5).encode()

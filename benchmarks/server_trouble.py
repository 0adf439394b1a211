"""Clients that a server must survive: they break off, send rubbish, send too much, or are slow.

pfml serve RUN --port 8000 --upload-megabytes 1 --upload-megapixels 4 &
python benchmarks/server_trouble.py --port 8000 --seconds 10

Prints as JSON which trouble got which answers ("closed" for none, "hung" for none in time), and those that it should
not have got. Only Python's own library, so that it starts at once and disturbs the server's other clients little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from server_requests import FORM_TYPE, Client, form, png, request, upload

__all__ = ["OPTIONS", "SLOW_TROUBLES", "TROUBLES", "outcomes", "wrong_outcomes"]

#: Of the server: limits that small requests can pass.
OPTIONS = ("--upload-megabytes", "1", "--upload-megapixels", "4")
UPLOAD_BYTES = 2**20
REFUSED = frozenset({"400", "403", "404", "405", "413", "415", "421", "422"})
CLOSED = frozenset({"closed"})


SMALL = png(28, 28)
LARGE = png(2000, 1990)  # just as many pixels as may be
BOMB = png(2100, 2000)  # more, in a few kilobytes


async def broken_upload(client: Client) -> str:
    """A connection that ends within a body."""
    content = upload(SMALL * client.random.choice([1, 200]))
    return await client.break_off(content[: client.random.randrange(20, len(content))], client.random.uniform(0, 0.05))


async def broken_answer(client: Client) -> str:
    """A connection that ends while the server works or answers."""
    targets = ["/api/images?limit=200", "/api/map", "/page/app.js", "/api/images/1/jpeg?size=large", "/api/why?id=2"]
    whole = client.random.choice([*(request("GET", target) for target in targets), upload(SMALL)])
    return await client.break_off(whole * client.random.choice([1, 1, 8]), client.random.uniform(0, 0.05))


async def bad_json(client: Client) -> str:
    """What is no JSON, or no decision."""
    body = client.random.choice(
        [b"{", b"[]", b"\xff\xfe", b'{"decision": "burn"}', b"[" * 5000, b"null", b'{"decision":NaN}']
    )
    return await client.answer(request("PUT", "/api/audit/x", body, content_type="application/json"))


async def bad_form(client: Client) -> str:
    """Multipart bodies that are none."""
    whole = form(SMALL)
    body = client.random.choice([whole[:60], whole[:-30], b"rubbish", b"", whole.replace(b"\r\n", b"\n")])
    kind = client.random.choice([FORM_TYPE, "multipart/form-data", "multipart/form-data; boundary=other"])
    return await client.answer(request("POST", "/api/search", body, content_type=kind))


async def wrong_type(client: Client) -> str:
    """An image, but not as a form."""
    kind = client.random.choice(["image/png", "application/json", "text/plain; charset=nonsense", "\xff", ""])
    return await client.answer(request("POST", "/api/search", SMALL, content_type=kind.encode("latin-1")))


async def missing_field(client: Client) -> str:
    """A form without the file, or with a string where the file should be."""
    body = client.random.choice([form(SMALL, "other"), form(SMALL).replace(b'; filename="x.png"', b"")])
    return await client.answer(request("POST", "/api/search", body, content_type=FORM_TYPE))


async def bad_numbers(client: Client) -> str:
    """Values out of their ranges."""
    numbers = ["-1", "0x10", "1e3", "nan", str(10**30), "9" * 5000, "%00", "1;drop", "%ff"]
    targets = [
        "/api/search?id={}",
        "/api/search?id=1&k={}9",
        "/api/why?id={}",
        "/api/images/{}/jpeg",
        "/api/images/{}",
    ]
    target = client.random.choice([*targets, "/api/images?offset={}x", "/api/map/potential?class_name={}"])
    return await client.answer(request("GET", target.format(client.random.choice(numbers))))


async def traversal(client: Client) -> str:
    """Paths that lead out of the page's folder."""
    ups = ["../", "%2e%2e/", "..%2f", "%2e%2e%2f", "....//", "..\\", "%252e%252e/"]
    target = client.random.choice(ups) * client.random.randrange(1, 9) + client.random.choice(
        ["etc/passwd", "app.py", "%00"]
    )
    return await client.answer(request("GET", client.random.choice(["/page/", "/api/images/", "/"]) + target))


async def wrong_method(client: Client) -> str:
    """Methods that a path does not have."""
    method = client.random.choice(["DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND"])
    return await client.answer(request(method, client.random.choice(["/", "/api/status", "/page/app.js"])))


async def garbage(client: Client) -> str:
    """Bytes that are no HTTP."""
    rubbish = client.random.choice(
        [client.random.randbytes(300), b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9", b"GET\r", b"\0"]
    )
    return await client.answer(rubbish + b"\r\n\r\n")


async def bad_head(client: Client) -> str:
    """Headers that are too long, contradict one another, or are of another server."""
    heads: list[dict[str, str | bytes]] = [
        {"x": "y" * 100_000},
        {f"x{k}": "y" * 100 for k in range(500)},
        {"content_length": "-5"},
        {"content_length": "9" * 30},
        {"content_length": "3", "Content_Length": "4"},
        {"transfer_encoding": "gzip"},
        {"host": "evil.example"},
        {"host": b"\xff[::"},
        {"origin": "https://evil.example"},
        {"cookie": b"\xff=\x80; ;;==" * 50, "host": "nobody"},
    ]
    return await client.answer(request("POST", "/api/search", None, **client.random.choice(heads)))


async def bad_chunks(client: Client) -> str:
    """A body in pieces whose sizes are none."""
    head = request("POST", "/api/search", None, transfer_encoding="chunked", content_type=FORM_TYPE)
    size = client.random.choice([b"zz\r\n", b"-1\r\n", b"f" * 40 + b"\r\n", b"5\r\nabc\r\n0\r\n\r\n"])
    return await client.answer(head + size)


async def announced_too_long(client: Client) -> str:
    """A body beyond the limit that says so."""
    length = str(client.random.choice([UPLOAD_BYTES + 2**17, 2**30, 2**62]))
    head = request("POST", "/api/search", None, content_length=length, content_type=FORM_TYPE)
    return await client.answer(head, b"\0" * 2**16)


async def silently_too_long(client: Client) -> str:
    """A body beyond the limit that does not say how long it is."""
    target = client.random.choice(["/api/search", "/api/audit/x"])
    method = "POST" if target == "/api/search" else "PUT"
    head = request(method, target, None, transfer_encoding="chunked", content_type=FORM_TYPE)
    start = form(b"").split(b"\r\n\r\n")[0] + b"\r\n\r\n"
    piece = b"10000\r\n" + bytes(2**16) + b"\r\n"
    return await client.answer(head, b"%x\r\n%s\r\n" % (len(start), start), *([piece] * 24))


async def no_picture(client: Client) -> str:
    """A file that is no picture, a damaged one, one that claims to be large, and one that is."""
    contents = [b"text", b"", png(300, 300)[:-200], png(9, 9, claimed=(60_000, 60_000)), BOMB]
    return await client.answer(upload(client.random.choice(contents)))


async def large_picture(client: Client) -> str:
    """A picture at the limit, which is searched for."""
    return await client.answer(upload(LARGE))


async def slow_upload(client: Client) -> str:
    """A good search that arrives in drops."""
    content = upload(SMALL, connection="close")
    step = len(content) // 10 + 1
    return await client.answer(*(content[k : k + step] for k in range(0, len(content), step)), pause=0.25)


async def slow_head(client: Client) -> str:
    """A few bytes of a head, one at a time, and then nobody."""
    _, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        for byte in request("GET", "/")[: client.random.randrange(5, 12)]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.25)
    finally:
        writer.transport.abort()
    return "closed"


async def silence(client: Client) -> str:
    """A connection without a word."""
    return await client.break_off(b"", 2.0)


async def slow_reader(client: Client) -> str:
    """Many large answers asked for, and none read."""
    return await client.break_off(request("GET", "/api/images?limit=200") * 60, 2.0)


@dataclass(frozen=True)
class Trouble:
    """A row of the table: what a client does, and which answers are right."""

    act: Callable[[Client], Awaitable[str]]
    right: frozenset[str] = REFUSED


TROUBLES = {
    "upload broken off": Trouble(broken_upload, CLOSED),
    "answer not waited for": Trouble(broken_answer, CLOSED),
    "bad JSON": Trouble(bad_json, frozenset({"422", "400", "404"})),
    "bad multipart": Trouble(bad_form),
    "wrong content type": Trouble(wrong_type, frozenset({"400", "422"})),
    "missing field": Trouble(missing_field, frozenset({"422"})),
    "bad numbers": Trouble(bad_numbers, frozenset({"404", "422"})),
    "path traversal": Trouble(traversal, REFUSED),
    "wrong method": Trouble(wrong_method, frozenset({"400", "405", "404"})),
    "no HTTP": Trouble(garbage, frozenset({"400", "421"})),
    "bad head": Trouble(bad_head, REFUSED | CLOSED),
    "bad chunks": Trouble(bad_chunks, frozenset({"400", "422"}) | CLOSED),
    "too long, announced": Trouble(announced_too_long, frozenset({"400", "413"}) | CLOSED),
    "too long, not announced": Trouble(silently_too_long, frozenset({"413"}) | CLOSED),
    "no picture": Trouble(no_picture, frozenset({"400", "413", "415", "422"})),
    "picture at the limit": Trouble(large_picture, frozenset({"200"})),
}
#: Those that take seconds by nature; each has clients of its own.
SLOW_TROUBLES = {
    "slow upload": Trouble(slow_upload, frozenset({"200"})),
    "slow head": Trouble(slow_head, CLOSED),
    "silence": Trouble(silence, CLOSED),
    "slow reader": Trouble(slow_reader, CLOSED),
}


async def outcomes(port: int, seconds: float, clients: int, seed: int) -> dict[str, Counter[str]]:
    """What each trouble was answered, by `clients` at a time and four slow ones of each kind beside them.

    Every trouble is made at least once, however short the time.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in (*TROUBLES, *SLOW_TROUBLES)}
    due = list(TROUBLES)
    end = time.monotonic() + seconds

    async def act(client: Client, name: str, trouble: Trouble) -> None:
        try:
            answer = await trouble.act(client)
        except ConnectionError:  # while it was being opened
            answer = "not connected"
        counts[name][answer] += 1

    async def any_trouble(number: int) -> None:
        client = Client(port, 1000 * seed + number)
        while due or time.monotonic() < end:
            name = due.pop() if due else client.random.choice(list(TROUBLES))
            await act(client, name, TROUBLES[name])

    async def one_trouble(number: int, name: str, trouble: Trouble) -> None:
        client = Client(port, 1000 * seed + 500 + number)
        await act(client, name, trouble)
        while time.monotonic() < end:
            await act(client, name, trouble)

    slow = [one_trouble(number, *item) for item in SLOW_TROUBLES.items() for number in range(4)]
    await asyncio.gather(*(any_trouble(number) for number in range(clients)), *slow)
    return counts


def wrong_outcomes(counts: dict[str, Counter[str]]) -> list[str]:
    """Answers that a trouble should not have got, in words."""
    table = {**TROUBLES, **SLOW_TROUBLES}
    return [
        f"{name}: {count} x {answer}, not one of {', '.join(sorted(table[name].right))}"
        for name, answers in counts.items()
        for answer, count in answers.items()
        if answer not in table[name].right
    ]


def main() -> None:
    """Make trouble for a while."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    counts = asyncio.run(outcomes(chosen.port, chosen.seconds, chosen.clients, chosen.seed))
    print(json.dumps({"answers": counts, "wrong": wrong_outcomes(counts)}, indent=1))


if __name__ == "__main__":
    main()

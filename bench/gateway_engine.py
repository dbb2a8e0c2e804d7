"""A light stand-in for an engine, as a process that a benchmark may kill.

    python -m bench.gateway_engine MODEL PORT [--gap SECONDS]

Streams `max_tokens` events, one every `--gap` seconds; each says which model it is of and when it
was sent (`sent`, seconds of the machine's monotonic clock).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import uvloop

OK = "HTTP/1.1 200 OK\r\nContent-Type: "


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--gap", type=float, default=0.01)
    asked = parser.parse_args()

    async def serve() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await _exchange(reader, writer, asked.model, asked.gap):
                    pass
            except (OSError, asyncio.IncompleteReadError):
                pass  # who asked has gone
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", asked.port, backlog=1024)
        print("ready", flush=True)
        await server.serve_forever()

    uvloop.run(serve())


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, gap_s: float
) -> bool:
    """One request and its answer; False once the connection is closed."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    body = json.loads(await reader.readexactly(length))
    count = int(body.get("max_tokens", 3))
    usage = {"prompt_tokens": 1, "completion_tokens": count}
    if not body.get("stream"):
        await asyncio.sleep(gap_s * count)
        choices = [{"text": "x" * count, "finish_reason": "length"}]
        answer = json.dumps({"model": model, "choices": choices, "usage": usage}).encode()
        head_of = f"{OK}application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
        writer.write(head_of.encode() + answer)
        await writer.drain()
        return True
    writer.write(f"{OK}text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    began = time.monotonic()
    for number in range(count):
        await asyncio.sleep(began + gap_s * number - time.monotonic())
        choices = [{"text": "x", "finish_reason": "length" if number == count - 1 else None}]
        _event(writer, {"model": model, "choices": choices, "sent": time.monotonic()})
        await writer.drain()
    if (body.get("stream_options") or {}).get("include_usage"):
        _event(writer, {"model": model, "choices": [], "usage": usage})
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _event(writer: asyncio.StreamWriter, content: object) -> None:
    _chunk(writer, f"data: {json.dumps(content)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


if __name__ == "__main__":
    main()

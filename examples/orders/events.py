"""Makes the stream of orders on the NATS server, and prints every event that comes.

The stream drops a message whose Nats-Msg-Id it has seen within `duplicate_window`: that makes
"at least once" into "once". The window must be longer than the time in which the gateway may try
again; here two minutes are enough.
"""

import asyncio
import os

import nats
from nats.js.api import StreamConfig


async def main():
    server = f"nats://127.0.0.1:{os.environ['NATS_PORT']}"
    client = await nats.connect(server, connect_timeout=10)
    stream = client.jetstream()
    await stream.add_stream(
        StreamConfig(name="ORDERS", subjects=["orders.>"], duplicate_window=120)
    )
    events = await stream.subscribe("orders.>", durable="printer")
    print("ready", flush=True)
    async for event in events.messages:
        name = event.headers["Nats-Msg-Id"]
        print(f"event {name} {event.subject} {event.data.decode().strip()}", flush=True)
        await event.ack()


asyncio.run(main())

"""One turn of the event loop: what was ready to run has run."""

import asyncio


async def turn() -> None:
    """Let the loop come round once."""
    came = asyncio.get_running_loop().create_future()
    came.get_loop().call_soon(came.set_result, None)
    await came

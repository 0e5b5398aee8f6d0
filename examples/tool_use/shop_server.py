"""A server of OpenEnv: a shop whose prices a model can only know by a call of the tool `price`.

    pip install openenv-core==0.3.0
    python examples/tool_use/shop_server.py 8765

An episode begins with the fields `seed` and `item` of a row. The seed determines the prices. A
message without a call is the answer: its reward is 1 if its only number is the price of the item.
"""

import random
import re
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 512


class ShopAction(Action):
    """A call of a tool, the request of the tools, or a message: the answer."""

    type: str = "message"
    tool_name: str = ""
    arguments: dict[str, object] | None = None
    message: str = ""


class ShopObservation(Observation):
    """The reply to an answer."""

    text: str = ""


def convert_action(action):
    """Return the action of a tool, or the message."""
    if action.type == "list_tools":
        return ListToolsAction()
    if action.type == "call_tool":
        return CallToolAction(tool_name=action.tool_name, arguments=action.arguments or {})
    return action


class Shop(MCPEnvironment):
    """One customer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("shop")

        @server.tool
        def price(item: str) -> int:
            """Return the price of an item."""
            name = item.lower().strip()
            if name != self.item:
                raise ValueError(f"the shop has no {item}")
            return self.price

        super().__init__(server)
        self.item, self.price, self.steps = "", 0, 0

    def reset(self, seed=None, episode_id=None, item="", **fields):
        """Choose the price of the item."""
        self.item, self.steps = item, 0
        self.price = random.Random(f"{seed} {item}").randint(11, 99)
        return ShopObservation(text="The shop is open.")

    def step(self, action, timeout_s=None, **fields):
        """Call a tool, or compare the answer."""
        self.steps += 1
        return super().step(convert_action(action), timeout_s)

    async def step_async(self, action, timeout_s=None, **fields):
        """See `step`."""
        self.steps += 1
        return await super().step_async(convert_action(action), timeout_s)

    def _step_impl(self, action, timeout_s=None, **fields):
        numbers = re.findall(r"\d+", action.message)
        right = numbers == [str(self.price)]
        return ShopObservation(text="Thank you.", reward=float(right), done=True)

    @property
    def state(self):
        """The number of steps of the episode."""
        return State(step_count=self.steps)


app = create_fastapi_app(Shop, ShopAction, ShopObservation, max_concurrent_envs=SESSIONS)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

"""A graph to start from: two nodes, a checkpoint after each."""

from typing import TypedDict

from langgraph.graph import END, START, StateGraph


class Greeting(TypedDict, total=False):
    """What the nodes read and write; the schedule's `input` is how it starts."""

    name: str
    asked_at: str
    words: list[str]
    text: str


async def choose_words(state: Greeting) -> Greeting:
    """Take your time here: call a model, read a table."""
    return {"words": ["Hello,", state.get("name", "world")]}


async def say(state: Greeting) -> Greeting:
    """If the replica dies before this node, the words above are in the checkpoint."""
    return {"text": " ".join(state["words"])}


builder = StateGraph(Greeting)
builder.add_node("choose_words", choose_words)
builder.add_node("say", say)
builder.add_edge(START, "choose_words")
builder.add_edge("choose_words", "say")
builder.add_edge("say", END)
# No checkpointer here: tickd gives each run one, on Postgres.
graph = builder.compile()

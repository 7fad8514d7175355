"""Tools of a user's own."""


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: One.
        b: The other.
    """
    return a + b


async def later(text: str) -> dict:
    """Answers later.

    Args:
        text: What.
    """
    return {"said": text}


def fails(text: str) -> str:
    """Fails.

    Args:
        text: How.
    """
    raise RuntimeError(text)


NUMBER = 3

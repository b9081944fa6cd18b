"""Looks at a pickle before it is loaded: the functions that it names, and how large its objects are.

A pickle of a few bytes can refer to one object many times, in containers inside containers. What then looks at it, even
a dict that takes it as a key, follows every reference and may never end. So the objects are counted here with all
references followed, and a pickle whose objects are much larger than itself is refused.
"""

import pickle
import pickletools
from dataclasses import dataclass
from typing import IO

_MOST = 16  # how many times larger than the pickle its objects may be
_FREE = 1 << 16  # small pickles may share more
_STORES = ("PUT", "BINPUT", "LONG_BINPUT")
_LOADS = ("GET", "BINGET", "LONG_BINGET")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")


@dataclass(slots=True, eq=False)
class _Item:
    """An object on the stack of a pickle."""

    size: int  # letters and objects in it, all references followed
    text: str = ""
    shared: bool = False  # the pickle has referred to it


class _Stack:
    """The stack of a pickle, with its marks."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self._marks: list[int] = []  # how many items were below each mark

    def take(self, opcode: pickletools.OpcodeInfo) -> list[_Item]:
        """Take the items that an opcode takes, without the mark."""
        before, items = opcode.stack_before, self.items
        if pickletools.markobject in before:
            mark = self._marks.pop()
            start = mark - before.index(pickletools.markobject)
        elif opcode.name == "POP" and self._marks[-1:] == [len(items)]:  # it can also take a mark
            self._marks.pop()
            return []
        else:
            start = len(items) - len(before)
        if start < (self._marks[-1] if self._marks else 0):
            raise IndexError
        taken = items[start:]
        del items[start:]
        return taken

    def put(self, opcode: pickletools.OpcodeInfo, item: _Item) -> None:
        """Put what an opcode gives."""
        for kind in opcode.stack_after:
            if kind is pickletools.markobject:
                self._marks.append(len(self.items))
            else:
                self.items.append(item)


def globals_of(data: bytes | IO[bytes], size: int) -> set[tuple[str, str]]:
    """The (module, name) pairs that a pickle asks for; an error if it is damaged or its objects are too large.

    Arguments:
        data: the pickle, or a file that is read from its position to the end of the pickle.
        size: how many bytes the pickle has at most.
    """
    names: set[tuple[str, str]] = set()
    stack = _Stack()
    memo: dict[int, _Item] = {}
    most, followed = _MOST * size + _FREE, 0
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in _STORES or name == "MEMOIZE":
                index = len(memo) if name == "MEMOIZE" else int(argument or 0)
                # The memo is a table that grows to the index it is given: one short opcode could ask for 64 GB.
                if not 0 <= index <= size:
                    raise pickle.UnpicklingError(f"memo index {index}, expected at most {size:,}")
                memo[index] = stack.items[-1]
                continue
            if name in _LOADS or name == "DUP":
                item = stack.items[-1] if name == "DUP" else memo[int(argument or 0)]
                item.shared = True
                stack.items.append(item)
                followed += item.size
            else:
                taken = stack.take(opcode)
                if name in _FILLS:
                    if taken[0].shared:
                        raise pickle.UnpicklingError("it changes an object after it has referred to it")
                    item = taken[0]
                    item.size += sum(other.size for other in taken[1:])
                else:
                    letters = len(argument) if isinstance(argument, str | bytes | bytearray) else 0
                    item = _Item(1 + letters + sum(other.size for other in taken))
                    item.text = argument if isinstance(argument, str) else ""
                if name in ("GLOBAL", "INST"):
                    module, _, wanted = item.text.partition(" ")
                    names.add((module, wanted))
                elif name == "STACK_GLOBAL":
                    names.add((taken[0].text, taken[1].text))
                stack.put(opcode, item)
            if max(item.size, followed) > most:
                raise pickle.UnpicklingError(f"its objects are more than {_MOST} times as large as its {size:,} bytes")
    except (IndexError, KeyError) as error:
        raise pickle.UnpicklingError("it takes an object that is not there") from error
    return names

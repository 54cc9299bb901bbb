"""Book-keeping of KV pages: pure, plain and synchronous."""

from pipelined.kv.books import PageBooks, Prefix
from pipelined.kv.pages import PageAllocator, runs
from pipelined.kv.radix import Node, RadixTree

__all__ = ["Node", "PageAllocator", "PageBooks", "Prefix", "RadixTree", "runs"]

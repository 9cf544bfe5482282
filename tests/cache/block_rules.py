"""Records how transformers' continuous batching counts blocks, in block_rules.json: `python tests/cache/block_rules.py`.

Its block manager and its search for prefixes run here without a model. Every line is an operation with the tokens that
were shared, the blocks in use after it, and the free blocks that a prefix is still found in.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_manager import BlockManager, FullAttentionCacheAllocator

BLOCKS, SIZE = 400, 16


def main():
    manager = BlockManager(BLOCKS, SIZE, tp_on=False)
    table = FullAttentionCacheAllocator(0, SIZE, allow_block_sharing=True)
    cache = SimpleNamespace(block_size=SIZE, _block_manager=manager, group_cache_managers=[table], _total_prefix_length=0)
    draw = random.Random(58)
    tokens, lines = {}, []

    def extend(name, ids):
        before = len(tokens[name])
        tokens[name] += ids
        missing = -(-len(tokens[name]) // SIZE) - len(table.block_table.get(name, []))
        table.allocate_blocks(missing, name, manager)
        complete = len(tokens[name]) // SIZE - before // SIZE
        if complete:
            manager.mark_shareable_blocks_as_complete(complete, table.block_table[name], tokens[name])

    for number in range(160):
        name = str(number)
        choice = draw.random()
        operation = {}
        if choice < 0.35 or not tokens:
            kind, common, length = draw.randrange(3), draw.randrange(70), draw.randrange(1, 90)
            # A prompt of whole blocks would be shared up to its last token, which this crate computes again.
            length += length % SIZE == 0
            ids = [kind * 1000 + i if i < common else 100_000 + number * 1000 + i for i in range(length)]
            shared = PagedAttentionCache.search_prefix_match(cache, name, ids)
            tokens[name] = ids[:shared]
            extend(name, ids[shared:])
            operation = {"add": {"kind": kind, "common": common, "length": length}, "shared": shared}
        elif choice < 0.7:
            other, count = draw.choice(list(tokens)), draw.choice([1, 1, 1, 5, 20])
            extend(other, generated(number, count))
            operation = {"extend": other, "count": count}
        elif choice < 0.85:
            # The fork gets a token at once: a block that is not full is copied by then.
            other = draw.choice(list(tokens))
            table.fork_blocks(other, [name], manager)
            tokens[name] = list(tokens[other])
            extend(name, generated(number, 1))
            operation = {"fork": other}
        else:
            other = draw.choice(list(tokens))
            table.free_blocks(other, manager)
            del tokens[other]
            operation = {"free": other}
        assert manager._uninit_block_ids, "the order in which blocks are reused differs"
        operation |= {"used": BLOCKS - manager.num_free_blocks, "found": len(manager._init_block_ids)}
        lines.append(json.dumps(operation))
    Path(__file__).with_suffix(".json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def generated(number, count):
    return [1_000_000 + number * 1000 + i for i in range(count)]


if __name__ == "__main__":
    main()

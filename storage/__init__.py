"""What remembers: Parquet in and out, shards, commit markers, the DuckDB catalogue."""

import os

# Arrow reads this when it is loaded. What it allocates inside (readers, writers, kernels) is not in
# the pool that `storage.allocator` sets later, and its own default keeps what is freed.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

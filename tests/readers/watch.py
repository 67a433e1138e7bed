"""Opens every Parquet file of a directory the moment it has its name, over and over.

    watch.py DIR        until a line comes on stdin; then says how many it has opened

Fails when one cannot be read whole, or when one that was read changes.
"""

import os
import select
import sys

import pyarrow.parquet


def look(directory, seen):
    for root, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(root, name)
            if not name.endswith(".parquet"):
                continue
            try:
                found = os.stat(path)
                state = (found.st_ino, found.st_size, found.st_mtime_ns)
                if path not in seen:
                    table = pyarrow.parquet.ParquetFile(path).read()
                    if table.num_rows == 0:
                        sys.exit(f"{path} has no rows")
            except FileNotFoundError:
                # Removed since: a copy that was begun again.
                continue
            except (pyarrow.ArrowException, OSError) as error:
                sys.exit(f"{path} cannot be read: {error}")
            if seen.setdefault(path, state) != state:
                sys.exit(f"{path} was changed after it had its name")


def main():
    seen = {}
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        look(sys.argv[1], seen)
    look(sys.argv[1], seen)
    print(len(seen))


main()

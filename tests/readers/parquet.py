"""Parquet files as columns of PostgreSQL's texts, read by pyarrow or by DuckDB."""

import pyarrow
import pyarrow.parquet

import postgres


def names(path):
    """Names of its columns, in order."""
    return pyarrow.parquet.read_schema(path).names


def read(path, engine, delimiters):
    """Each column's cells by its name: texts, or None for null; `_tg_missing` has lists."""
    if engine == "duckdb":
        table = read_with_duckdb(path)
    else:
        # Of the file alone: not what the directories above it may be taken to say.
        table = pyarrow.parquet.ParquetFile(path).read()
    columns = {}
    for name in table.column_names:
        cells = []
        for chunk in table.column(name).chunks:
            cells.extend(chunk.to_pylist() if name == "_tg_missing" else texts(chunk, delimiters.get(name, ",")))
        columns[name] = cells
    return columns


def read_with_duckdb(path):
    import duckdb

    query = "SELECT * EXCLUDE (file_row_number) FROM read_parquet(?, file_row_number = true) ORDER BY file_row_number"
    return duckdb.execute(query, [path]).to_arrow_table()


def texts(array, delimiter=","):
    """The cells of an Arrow array as PostgreSQL prints them; `delimiter` is of its lists."""
    if isinstance(array, pyarrow.ExtensionArray):
        array = array.storage
    kind, types = array.type, pyarrow.types
    if types.is_list(kind):
        items, offsets = texts(array.values), array.offsets.to_pylist()
        cells = [items[start:end] for start, end in zip(offsets, offsets[1:])]
        valid = array.is_valid().to_pylist()
        return [postgres.array_text(cell, delimiter) if valid else None for cell, valid in zip(cells, valid)]
    if types.is_date32(kind):
        return each(postgres.date, array.cast(pyarrow.int32()))
    if types.is_time64(kind):
        return each(postgres.time, array.cast(pyarrow.int64()))
    if types.is_timestamp(kind):
        zone = "" if kind.tz is None else "+00"
        return each(lambda microseconds: postgres.timestamp(microseconds, zone), array.cast(pyarrow.int64()))
    if types.is_boolean(kind):
        return each(lambda value: "t" if value else "f", array)
    if types.is_float32(kind):
        return each(postgres.float4, array)
    if types.is_float64(kind):
        return each(postgres.float8, array)
    if types.is_decimal(kind):
        return each(lambda value: format(value, "f"), array)
    if types.is_fixed_size_binary(kind):
        return each(postgres.uuid, array)
    if types.is_binary(kind):
        return each(lambda value: "\\x" + value.hex(), array)
    return each(str, array)


def each(text, array):
    return [None if value is None else text(value) for value in array.to_pylist()]


# How the manifest spells Arrow's types, where pyarrow spells them otherwise.
SPELLED = {
    "date32": "date32[day]",
    "timestamp[us, UTC]": "timestamp[us, tz=UTC]",
    "uuid": "extension<arrow.uuid>",
    "utf8": "string",
}


def check_types(path, columns):
    """Whether the file has the manifest's columns and types."""
    found = [(field.name, str(field.type)) for field in pyarrow.parquet.read_schema(path)]
    wanted = []
    for column in columns:
        kind = column["type"]
        if kind.startswith("list<"):
            element = kind[len("list<") : -1]
            kind = f"list<element: {SPELLED.get(element, element)}>"
        wanted.append((column["name"], SPELLED.get(kind, kind)))
    if found != wanted:
        raise SystemExit(f"{path}: {found} are not {wanted}")

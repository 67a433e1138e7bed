"""How PostgreSQL prints values with DateStyle ISO, TimeZone UTC, bytea_output hex and
extra_float_digits above 0. Written apart from the plugin's own code, to check it."""

import math
import struct
from decimal import Decimal
from fractions import Fraction

DAY = 86_400_000_000


def date_and_era(days):
    """Days since 1970-01-01, proleptic Gregorian: Python's own dates end at year 1."""
    days += 719_468
    era, day_of_era = divmod(days, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * shifted + 2) // 5 + 1
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = year_of_era + era * 400 + (month <= 2)
    text = f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}"
    return text, "" if year > 0 else " BC"


def date(days):
    return "".join(date_and_era(days))


def time(microseconds):
    seconds, fraction = divmod(microseconds, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return text + (f".{fraction:06}".rstrip("0") if fraction else "")


def timestamp(microseconds, zone):
    days, rest = divmod(microseconds, DAY)
    day, era = date_and_era(days)
    return f"{day} {time(rest)}{zone}{era}"


def uuid(value):
    digits = value.hex()
    return "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]])


def float8(value):
    return floating(value, shortest(value, "d", 17), 15)


def float4(value):
    return floating(value, shortest(value, "f", 9), 6)


def shortest(value, width, most):
    """The shortest decimal nearest to this number and no other; one that lies halfway
    between two is nearest to neither."""
    if not math.isfinite(value) or value == 0:
        return "0"
    bits = {"f": "I", "d": "Q"}[width]
    number = struct.unpack(bits, struct.pack(width, abs(value)))[0]
    exact = Fraction(abs(value))
    below = Fraction(struct.unpack(width, struct.pack(bits, number - 1))[0])
    above = struct.unpack(width, struct.pack(bits, number + 1))[0]
    above = Fraction(above) if math.isfinite(above) else 2 * exact - below
    for digits in range(most):
        text = f"{value:.{digits}e}"
        if (below + exact) / 2 < abs(Fraction(text)) < (exact + above) / 2:
            return text
    raise ValueError(f"{value} has no text of {most} digits")


def floating(value, shortest, fixed):
    """`shortest` names the value; beyond `fixed` digits it is written with an exponent."""
    if math.isnan(value):
        return "NaN"
    sign = "-" if math.copysign(1, value) < 0 else ""
    if math.isinf(value):
        return sign + "Infinity"
    if value == 0:
        return sign + "0"
    _, digits, exponent = Decimal(shortest).as_tuple()
    exponent += len(digits) - 1
    digits = "".join(map(str, digits)).rstrip("0")
    if exponent < -4 or exponent >= fixed:
        fraction = "." + digits[1:] if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{fraction}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
    return sign + whole + ("." + fraction if fraction else "")


def array_text(items, delimiter=","):
    """An array of one dimension; None is NULL."""
    return "{" + delimiter.join("NULL" if item is None else quoted(item, delimiter) for item in items) + "}"


def quoted(item, delimiter):
    plain = item and item.upper() != "NULL" and not any(byte in item for byte in '"\\{} \t\n\r\v\f' + delimiter)
    return item if plain else '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'


ESCAPES = str.maketrans(
    {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
)


def copy_line(texts):
    """A row as COPY ... TO STDOUT prints it."""
    return "\t".join("\\N" if text is None else text.translate(ESCAPES) for text in texts) + "\n"

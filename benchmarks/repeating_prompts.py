"""Prompts whose answers repeat much of the prompt (edit this file, quote this passage), and open chat prompts."""

from __future__ import annotations

_CODE = """\
import csv
from dataclasses import dataclass


@dataclass
class Reading:
    station: str
    hour: int
    temperature: float


def load_readings(path):
    readings = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            readings.append(Reading(row["station"], int(row["hour"]), float(row["temperature"])))
    return readings


def average_temperature(readings, station):
    values = [reading.temperature for reading in readings if reading.station == station]
    if not values:
        return None
    return sum(values) / len(values)


def warmest_hour(readings, station):
    best = None
    for reading in readings:
        if reading.station != station:
            continue
        if best is None or reading.temperature > best.temperature:
            best = reading
    return None if best is None else best.hour
"""
_SETTINGS = """\
server:
  host: 0.0.0.0
  port: 8080
  workers: 4
  timeout: 30
database:
  host: db.internal
  port: 5432
  name: inventory
  user: reader
  pool_size: 10
logging:
  level: info
  format: json
  file: /var/log/inventory/server.log
  rotate: daily
cache:
  host: cache.internal
  port: 6379
  ttl: 300
features:
  search: true
  export: false
  reports: true
"""
_TABLE = """\
name,city,product,quantity,price
Anna Berg,Oslo,desk lamp,2,39.90
Tomas Novak,Prague,office chair,1,189.00
Lucia Romano,Milan,standing desk,1,420.00
Peter Jansen,Utrecht,desk lamp,4,39.90
Maria Lopez,Seville,bookshelf,2,95.50
Jakob Weiss,Vienna,office chair,3,189.00
Ines Costa,Porto,filing cabinet,1,149.00
Henrik Lund,Aarhus,bookshelf,1,95.50
"""
_PAGE = """\
<html>
  <head>
    <title>Harbour Museum</title>
  </head>
  <body>
    <h1>Harbour Museum</h1>
    <p>The museum is open from Tuesday to Sunday, from ten in the morning to five in the afternoon.</p>
    <h2>Exhibitions</h2>
    <ul>
      <li><a href="/ships">Ships of the northern coast</a></li>
      <li><a href="/maps">Maps and instruments</a></li>
      <li><a href="/storms">The great storms</a></li>
    </ul>
    <h2>Tickets</h2>
    <p>Adults pay twelve euros, students eight euros. Children under ten years enter free of charge.</p>
    <p>Groups of ten or more should write to us at least one week before their visit.</p>
  </body>
</html>
"""
_RECORD = """\
{
  "order": 48213,
  "customer": {"name": "Anna Berg", "email": "anna@example.com", "city": "Oslo"},
  "items": [
    {"product": "desk lamp", "quantity": 2, "price": 39.9, "currency": "EUR"},
    {"product": "office chair", "quantity": 1, "price": 189.0, "currency": "EUR"},
    {"product": "bookshelf", "quantity": 2, "price": 95.5, "currency": "EUR"}
  ],
  "shipping": {"method": "standard", "days": 5, "address": "Harbour Street 12, 0150 Oslo"},
  "status": "packed",
  "notes": "Please ring the bell twice and leave the parcels with the neighbour if nobody answers."
}
"""
_STORY = """\
The lighthouse stood at the end of a long spit of sand, and for thirty years the same man had climbed its stairs every
evening. He knew each of the two hundred and twelve steps, the one that creaked, the one that was worn in the middle,
the one where his father had once carved a small ship into the stone. In winter the wind came straight from the sea and
the glass of the lantern was white with salt by the morning. In summer the swallows nested under the gallery, and he
left the door open so that they could come and go. When the letter arrived that said the light would be automatic from
the first of May, he read it twice, folded it, and went up the stairs as he did every evening.
"""
_RULES = """\
1. Members may borrow up to six books at a time for a period of three weeks.
2. A loan may be renewed twice, unless another member has asked for the book.
3. Books that are returned late cost twenty cents for each day and each book.
4. A book that is lost or damaged must be replaced or paid for at its current price.
5. Reference works, newspapers and maps are read in the library and are not lent.
6. Food and drink are not allowed in the reading room; water in closed bottles is.
7. Telephones are to be silent, and calls are made outside the building.
8. The library may exclude members who break these rules repeatedly.
"""
_MINUTES = """\
The meeting began at nine. Maria reported that the new warehouse will open in October, two weeks later than planned,
because the sprinklers have to be tested again. Tomas said that the delivery vans are ordered and that the first four
will arrive in September. It was agreed that the old warehouse stays in use until the end of the year. Ines presented
the figures of the second quarter: sales rose by eight percent, returns fell by two percent, and the cost of shipping
was unchanged. Peter asked for a second person in customer service, which was granted from the first of November. The
next meeting is on the twelfth of August at nine.
"""
_RECIPE = """\
Peel four large potatoes and cut them into slices as thick as a finger. Slice two onions. Heat three spoons of oil in a
wide pan and fry the onions slowly until they are golden, then take them out. Fry the potatoes in the same pan on both
sides until they are brown, about fifteen minutes. Beat six eggs with a little salt and pepper, add the onions and the
potatoes, and let everything rest for ten minutes. Pour the mixture back into the pan and cook it over a low heat until
the edge is firm. Put a plate on the pan, turn both over, and let the other side cook for three more minutes.
"""
_LETTER = """\
Dear Mr. Lund,

thank you for your order of the third of June. We are sorry that the bookshelf arrived with a scratch on its left side.
A new side panel left our warehouse this morning and should reach you within three working days. You do not have to send
the damaged panel back. If you prefer, we can instead refund twenty percent of the price to the account you paid from.
Please let us know which of the two you would like. We hope that you will enjoy the bookshelf for many years.

With kind regards,
Lucia Romano
Customer Service
"""


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}```"


REPEATING: dict[str, str] = {
    "rename in a Python file": f"Here is a Python file:\n\n{_fenced('python', _CODE)}\n\n"
    "Write the whole file again, with the function `warmest_hour` renamed to `hottest_hour`.",
    "docstrings for a Python file": "Add a docstring to each function and write the whole file:\n\n"
    + _fenced("python", _CODE),
    "change a port in YAML": _fenced("yaml", _SETTINGS)
    + "\n\nWrite this file again with the server's port changed to 9090.",
    "add a column to CSV": _fenced("csv", _TABLE)
    + "\n\nAdd a column `currency` with the value EUR and write the table.",
    "change a title in HTML": _fenced("html", _PAGE)
    + "\n\nWrite this page again with the title 'Museum of the Harbour'.",
    "set a field in JSON": _fenced("json", _RECORD) + "\n\nWrite this order again with the status set to shipped.",
    "quote a story": f"{_STORY}\nRepeat the passage above word for word.",
    "quote rules": f"These are the rules of a library:\n\n{_RULES}\n"
    "Write down all of the rules again, exactly as they are.",
    "quote minutes": f"Minutes:\n\n{_MINUTES}\nCopy the minutes word for word.",
    "quote a recipe": f"{_RECIPE}\nRepeat the recipe above exactly, word for word.",
    "quote a letter": f"Here is a letter:\n\n{_LETTER}\nWrite the same letter again, without any change.",
}
"""Work that repeats what the prompt says, by name."""

CHAT: tuple[str, ...] = (
    "What is the difference between weather and climate?",
    "Write a short poem about a river in autumn.",
    "How do I prepare for my first job interview?",
    "Explain to a child why the sky is blue.",
    "Give me five ideas for a rainy weekend with two children.",
    "What should I think about before adopting a dog?",
    "Tell me a story about a robot that learns to paint.",
    "How does a bicycle stay upright?",
    "What are the advantages and disadvantages of working from home?",
    "Describe a busy market in a port town.",
    "Why do leaves change their colour in autumn?",
    "Suggest a simple plan for learning the guitar.",
)
"""Open questions."""

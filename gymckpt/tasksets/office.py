"""The office that a workbench task happens in: customers, products, stock, orders, mail and a calendar.

Derived from a seed alone, so that a task row only names the seed. Money is in cents; days are ISO dates.
"""

import random
from dataclasses import dataclass

WAREHOUSES = ("Hamburg", "Lyon", "Porto")
DAYS = tuple(f"2031-03-{day:02d}" for day in (3, 4, 5, 6, 7, 10, 11, 12, 13, 14))
TODAY = DAYS[0]
FIRST_ORDER_ID = 5001
SUPPLIER = "Northern Supplies"
OFFICE_ADDRESS = "office@workbench.example"

_COMPANY_FIRST = (
    "Alder",
    "Birch",
    "Cedar",
    "Dogwood",
    "Elm",
    "Fir",
    "Hazel",
    "Juniper",
    "Larch",
    "Maple",
    "Oak",
    "Rowan",
)
_COMPANY_LAST = ("Bakery", "Clinic", "Hotel", "Library", "Museum", "Press", "School", "Studio", "Theatre", "Works")
_CITIES = ("Bergen", "Bruges", "Ghent", "Graz", "Leeds", "Malmo", "Nantes", "Pisa", "Split", "Turku")
_ADJECTIVES = ("blue", "folding", "glass", "oak", "padded", "small", "steel", "tall")
_THINGS = ("bench", "cabinet", "chair", "desk", "easel", "lamp", "shelf", "stool", "table")
_FIRST_NAMES = ("Ada", "Bruno", "Chiara", "Dilan", "Emil", "Farah", "Goran", "Hedda", "Ivo", "Jana", "Kofi", "Lena")
_LAST_NAMES = ("Amsel", "Brandt", "Conti", "Dahl", "Eriksen", "Fabre", "Greco", "Holm", "Ito", "Jansen")
_TEAMS = ("accounts", "buying", "sales", "shipping")
_TOPICS = ("budget review", "fire drill", "hiring round", "price list", "quarter plan", "roof repair", "spring fair")
_CHATTER = (
    "Thank you for the quick delivery last month. Everything arrived in good order.",
    "We will be closed on Friday afternoon; please do not send anybody then.",
    "Could somebody call us about the invoice? There is no hurry.",
    "The sample was well received here, and we may come back to it in summer.",
)


@dataclass(frozen=True, slots=True)
class Customer:
    customer_id: str
    name: str
    city: str
    email: str


@dataclass(frozen=True, slots=True)
class Product:
    sku: str
    name: str
    price_cents: int


@dataclass(frozen=True, slots=True)
class Line:
    sku: str
    quantity: int


@dataclass(frozen=True, slots=True)
class Order:
    order_id: int
    customer_id: str
    status: str
    placed: str
    warehouse: str | None
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Colleague:
    name: str
    email: str
    team: str


@dataclass(frozen=True, slots=True)
class Mail:
    mail_id: int
    folder: str
    sender: str
    recipient: str
    subject: str
    body: str
    day: str


@dataclass(frozen=True, slots=True)
class Event:
    event_id: int
    title: str
    day: str
    start: str
    minutes: int
    attendees: tuple[str, ...]
    """E-mail addresses."""


@dataclass(frozen=True, slots=True)
class Office:
    """Everything there is before the first tool call."""

    seed: str
    customers: tuple[Customer, ...]
    products: tuple[Product, ...]
    stock: dict[tuple[str, str], int]
    """Pieces by (sku, warehouse)."""
    orders: tuple[Order, ...]
    colleagues: tuple[Colleague, ...]
    mail: tuple[Mail, ...]
    events: tuple[Event, ...]

    def open_orders(self, customer_id: str) -> list[Order]:
        """The customer's open orders, oldest id first."""
        return [order for order in self.orders if order.customer_id == customer_id and order.status == "open"]


def clock_time(minutes: int) -> str:
    """`minutes` after midnight as HH:MM."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def minutes_of(text: str) -> int:
    """Minutes after midnight of HH:MM."""
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def make_office(seed: str) -> Office:
    """The office of `seed`: always the same for the same seed."""
    chance = random.Random(f"office {seed}")
    customers = _customers(chance)
    products = _products(chance)
    colleagues = _colleagues(chance)
    orders = _orders(chance, customers, products)
    return Office(
        seed=seed,
        customers=customers,
        products=products,
        stock={(product.sku, warehouse): chance.randint(4, 60) for product in products for warehouse in WAREHOUSES},
        orders=orders,
        colleagues=colleagues,
        mail=_mail(chance, customers, products, orders),
        events=_events(chance, colleagues),
    )


def _customers(chance: random.Random) -> tuple[Customer, ...]:
    customers = []
    for index, first in enumerate(_COMPANY_FIRST):
        name = f"{first} {chance.choice(_COMPANY_LAST)}"
        email = f"orders@{name.lower().replace(' ', '-')}.example"
        customers.append(Customer(f"C{101 + index}", name, chance.choice(_CITIES), email))
    return tuple(customers)


def _products(chance: random.Random) -> tuple[Product, ...]:
    names = [f"{adjective} {thing}" for adjective in _ADJECTIVES for thing in _THINGS]
    return tuple(
        Product(f"P{201 + index}", name, chance.randint(9, 400) * 50)
        for index, name in enumerate(chance.sample(names, 16))
    )


def _colleagues(chance: random.Random) -> tuple[Colleague, ...]:
    colleagues = []
    for first in _FIRST_NAMES:
        last = chance.choice(_LAST_NAMES)
        address = f"{first}.{last}@workbench.example".lower()
        colleagues.append(Colleague(f"{first} {last}", address, chance.choice(_TEAMS)))
    return tuple(colleagues)


def _orders(chance: random.Random, customers: tuple[Customer, ...], products: tuple[Product, ...]) -> tuple[Order, ...]:
    # Every customer has some open orders, so that any of them can be the subject of a job.
    owners = [customer.customer_id for customer in customers for _ in range(chance.randint(1, 4))]
    chance.shuffle(owners)
    orders = []
    for index, owner in enumerate(owners):
        lines = tuple(Line(item.sku, chance.randint(1, 9)) for item in chance.sample(products, chance.randint(1, 3)))
        shipped = chance.random() < 0.15
        orders.append(
            Order(
                order_id=FIRST_ORDER_ID + index,
                customer_id=owner,
                status="shipped" if shipped else "open",
                placed=f"2031-02-{chance.randint(1, 28):02d}",
                warehouse=chance.choice(WAREHOUSES) if shipped else None,
                lines=lines,
            )
        )
    return tuple(orders)


def _mail(
    chance: random.Random, customers: tuple[Customer, ...], products: tuple[Product, ...], orders: tuple[Order, ...]
) -> tuple[Mail, ...]:
    letters: list[tuple[str, str, str]] = []
    for customer in customers:
        letters.append(
            (customer.email, chance.choice(("A question", "Thanks", "About the invoice")), chance.choice(_CHATTER))
        )
        mine = [order for order in orders if order.customer_id == customer.customer_id and order.status == "open"]
        if mine:
            order, product = chance.choice(mine), chance.choice(products)
            body = (
                f"Good morning, we need a little more than we thought. Please add {chance.randint(2, 12)} x "
                f"{product.name} to our order {order.order_id}. Kind regards, {customer.name}"
            )
            letters.append((customer.email, f"Order {order.order_id}", body))
    chance.shuffle(letters)
    return tuple(
        Mail(7001 + index, "inbox", sender, OFFICE_ADDRESS, subject, body, f"2031-02-{chance.randint(20, 28):02d}")
        for index, (sender, subject, body) in enumerate(letters)
    )


def _events(chance: random.Random, colleagues: tuple[Colleague, ...]) -> tuple[Event, ...]:
    events: list[Event] = []
    for day in DAYS:
        topics = chance.sample(_TOPICS, 3)
        start = 9 * 60
        for topic in topics:
            start += chance.choice((0, 30, 60))
            minutes = chance.choice((30, 60, 90))
            attendees = tuple(person.email for person in chance.sample(colleagues, chance.randint(1, 3)))
            events.append(Event(9001 + len(events), f"{topic} {day[-2:]}", day, clock_time(start), minutes, attendees))
            start += minutes
    return tuple(events)

"""Jobs about mail, the calendar and customers' files."""

import re
from typing import Any

from gymckpt.tasksets.decision import ToolCall
from gymckpt.tasksets.jobs import Draw, Job, JobKind, Plan, PlanLost, call, first_gap, one, rows_of, value
from gymckpt.tasksets.office import Customer, Mail

_MEETINGS = ("Delivery plan", "Handover", "Price talk", "Season start", "Stock count")
_NOTES = (
    "Prefers deliveries before noon.",
    "Ask for the back entrance.",
    "Pays within ten days.",
    "Wants one invoice a month.",
)
_REQUEST = re.compile(r"Please add (\d+) x ([a-z]+ [a-z]+) to our order (\d+)\.")


def _request_of(draw: Draw) -> tuple[Customer, Mail]:
    """A customer, not drawn before, whose mail asks for something."""
    while True:
        customer = draw.customer()
        for mail in draw.office.mail:
            if mail.sender == customer.email and _REQUEST.search(mail.body):
                return customer, mail


def _make_mail_request(draw: Draw) -> Job:
    customer, mail = _request_of(draw)
    request = _REQUEST.search(mail.body)
    assert request is not None
    quantity, product, order_id = request.groups()
    sku = next(item.sku for item in draw.office.products if item.name == product)
    return Job(
        f"{customer.name} sent a mail from {customer.email} about one of their orders: "
        "do what it asks, and archive it.",
        [
            [call("search_mail", sender=customer.email)],
            [call("read_mail", mail_id=mail.mail_id)],
            [call("find_product", name=product)],
            [call("add_order_line", order_id=int(order_id), sku=sku, quantity=int(quantity))],
            [call("archive_mail", mail_id=mail.mail_id)],
        ],
    )


def _plan_mail_request(match: re.Match[str]) -> Plan:
    (found,) = yield [call("search_mail", sender=match.group(2))]
    mail_id = next((row["mail_id"] for row in rows_of(found, "mails") if row["subject"].startswith("Order ")), None)
    if mail_id is None:
        raise PlanLost
    (mail,) = yield [call("read_mail", mail_id=mail_id)]
    request = _REQUEST.search(str(value(mail, "body")))
    if request is None:
        raise PlanLost
    quantity, product, order_id = request.groups()
    (products,) = yield [call("find_product", name=product)]
    sku = one(products, "products", product)["sku"]
    yield [call("add_order_line", order_id=int(order_id), sku=sku, quantity=int(quantity))]
    yield [call("archive_mail", mail_id=mail_id)]


def _make_meeting(draw: Draw) -> Job:
    day, title = draw.day(), draw.chance.choice(_MEETINGS)
    first, second = draw.chance.sample(draw.office.colleagues, 2)
    minutes = draw.chance.choice((30, 45, 60))
    start = first_gap([(event.start, event.minutes) for event in draw.office.events if event.day == day], minutes)
    return Job(
        f"Put a meeting '{title}' of {minutes} minutes with {first.name} and {second.name} into the calendar of {day}, "
        "at the earliest time from 09:00 at which nothing else is on.",
        [
            [call("find_colleague", name=first.name), call("find_colleague", name=second.name)],
            [call("list_events", day=day)],
            [_event(title, day, start, minutes, [first.email, second.email])],
        ],
    )


def _event(title: str, day: str, start: str, minutes: int, attendees: list[str]) -> ToolCall:
    return call("create_event", title=title, day=day, start=start, minutes=minutes, attendees=attendees)


def _plan_meeting(match: re.Match[str]) -> Plan:
    title, minutes, first, second, day = match.groups()
    people = yield [call("find_colleague", name=first), call("find_colleague", name=second)]
    emails = [one(output, "colleagues", name)["email"] for output, name in zip(people, (first, second), strict=True)]
    (calendar,) = yield [call("list_events", day=day)]
    busy = [(row["start"], row["minutes"]) for row in rows_of(calendar, "events")]
    yield [_event(title, day, first_gap(busy, int(minutes)), int(minutes), emails)]


def _make_move(draw: Draw) -> Job:
    day, later = draw.day(), draw.day()
    event = draw.chance.choice([event for event in draw.office.events if event.day == day])
    start = draw.chance.choice(("15:00", "16:00", "16:30"))
    subject, text = f"Moved: {event.title}", f"New time: {later} {start}"
    return Job(
        f"Move '{event.title}' from {day} to {later} at {start}, and mail everybody who attends, one by one, "
        f"with the subject '{subject}' and the text '{text}'.",
        [
            [call("list_events", day=day)],
            [call("move_event", event_id=event.event_id, day=later, start=start)],
            *([call("send_mail", recipient=address, subject=subject, body=text)] for address in event.attendees),
        ],
    )


def _plan_move(match: re.Match[str]) -> Plan:
    title, day, later, start, subject, text = match.groups()
    (calendar,) = yield [call("list_events", day=day)]
    event: dict[str, Any] | None = next((row for row in rows_of(calendar, "events") if row["title"] == title), None)
    if event is None:
        raise PlanLost
    yield [call("move_event", event_id=event["event_id"], day=later, start=start)]
    for address in event["attendees"]:
        yield [call("send_mail", recipient=address, subject=subject, body=text)]


def _make_note(draw: Draw) -> Job:
    customer, text = draw.customer(), draw.chance.choice(_NOTES)
    return Job(
        f"Write '{text}' into the file of {customer.name}.",
        [
            [call("find_customer", name=customer.name)],
            [call("add_note", customer_id=customer.customer_id, text=text)],
        ],
    )


def _plan_note(match: re.Match[str]) -> Plan:
    text, customer = match.groups()
    (found,) = yield [call("find_customer", name=customer)]
    yield [call("add_note", customer_id=one(found, "customers", customer)["customer_id"], text=text)]


_NAME = r"([A-Z][a-z]+ [A-Z][a-z]+)"
_DAY = r"(\d{4}-\d\d-\d\d)"

DESK_JOBS = (
    JobKind(
        "mail_request",
        _make_mail_request,
        re.compile(rf"{_NAME} sent a mail from (\S+) about one of their orders: do what it asks"),
        _plan_mail_request,
    ),
    JobKind(
        "meeting",
        _make_meeting,
        re.compile(rf"Put a meeting '([^']+)' of (\d+) minutes with {_NAME} and {_NAME} into the calendar of {_DAY},"),
        _plan_meeting,
    ),
    JobKind(
        "move",
        _make_move,
        re.compile(
            rf"Move '([^']+)' from {_DAY} to {_DAY} at (\d\d:\d\d), "
            r".* with the subject '([^']+)' and the text '([^']+)'"
        ),
        _plan_move,
    ),
    JobKind("note", _make_note, re.compile(rf"Write '([^']+)' into the file of {_NAME}\."), _plan_note),
)

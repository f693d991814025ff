# ruff: noqa: E501
"""The text that AWQ and GPTQ are fitted to by default: written for this project, a little of everything."""

TEXTS = (
    """The harbour wakes before the town does. At four the ice lorries come down the hill, and by five the first boats are back with \
whatever the night gave them. Nobody talks much. Crates are dragged over wet stone, a radio murmurs about the wind, and the gulls wait \
on the roof of the weighing house as if they had tickets. By the time the bakery opens, most of the fish has been sold, and what is \
left of the morning belongs to people who have already done a day's work. My grandfather said that you could tell a buyer's mood from \
his gloves: new ones meant he had money and no patience, old ones meant he would stand and argue over every box until the ice melted.""",
    """Rain falls on high ground and soaks into the soil. Some of it evaporates, some is drawn up by roots, and the rest moves slowly \
downwards until it meets rock that it cannot pass. Above that rock the pores of the ground are full, and the upper edge of the filled \
zone is called the water table. A well works because its bottom lies below that edge. In a dry summer the table sinks, and shallow \
wells fail first. Where the table meets a slope, water comes out by itself, as a spring. The temperature of a spring hardly changes \
between January and July, since the ground a few metres down keeps close to the average of the year. That is also why a cellar feels \
warm in winter and cool in summer, although its temperature is nearly the same in both.""",
    """User: My sourdough bread is dense and does not rise. What am I doing wrong?
Assistant: There are three usual reasons. First, the starter may be too young or too cold: it should double within six hours of being \
fed before you bake with it. Second, the dough may not have rested long enough. In a cool kitchen the first rise can take eight hours. \
Third, the dough may be too dry. Try these changes one at a time:
1. Feed the starter twice on the day before you bake.
2. Let the dough rest until it has grown by half, however long that takes.
3. Add 20 grams of water for each 500 grams of flour.
If the crust is pale as well, bake it ten minutes longer in a covered pot.
User: Thanks! How do I know when it is done inside?
Assistant: Knock on the bottom of the loaf: it should sound hollow. If you have a thermometer, the middle should be at 96 degrees Celsius.""",
    '''import csv
from collections import defaultdict
from pathlib import Path


def monthly_totals(path: Path, currency: str = "EUR") -> dict[str, float]:
    """Sum the amounts of a bank export by month; rows in other currencies are left out."""
    totals: dict[str, float] = defaultdict(float)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter=";"):
            if row["currency"] != currency:
                continue
            month = row["date"][:7]
            totals[month] += float(row["amount"].replace(",", "."))
    return dict(sorted(totals.items()))


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()


if __name__ == "__main__":
    for month, total in monthly_totals(Path("export.csv")).items():
        print(f"{month}: {total:10.2f}")
''',
    """function debounce(callback, delay) {
  let timer = null;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => callback(...args), delay);
  };
}

SELECT customers.name, COUNT(orders.id) AS number_of_orders, SUM(orders.total) AS spent
FROM customers
LEFT JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2023-01-01'
GROUP BY customers.name
ORDER BY spent DESC
LIMIT 10;

for file in *.log; do
  gzip --keep "$file" && echo "packed $file"
done
""",
    """{"order": {"id": 48213, "customer": {"name": "Lena Vogt", "email": "lena.vogt@example.org"}, "items": [{"sku": "A-104", \
"title": "Desk lamp", "quantity": 1, "price": 39.9}, {"sku": "C-220", "title": "USB cable, 2 m", "quantity": 3, "price": 7.5}], \
"shipping": {"method": "standard", "address": {"street": "Lindenweg 4", "city": "Ulm", "postcode": "89073"}}, "paid": true, \
"total": 62.4, "notes": null}}
{"sensor": "roof-2", "readings": [{"t": "2024-03-01T06:00:00Z", "temperature": 3.1, "humidity": 0.82}, {"t": "2024-03-01T07:00:00Z", \
"temperature": 3.8, "humidity": 0.79}, {"t": "2024-03-01T08:00:00Z", "temperature": 5.4, "humidity": 0.71}], "battery": 0.93}""",
    """12 + 7 = 19. 45 - 18 = 27. 6 x 8 = 48. 81 / 9 = 9. 15 + 26 = 41. 100 - 37 = 63. 7 x 12 = 84. 144 / 12 = 12. 9 + 9 = 18.
Question: A train leaves at 9:15 and arrives at 11:40. How long does the journey take?
Answer: From 9:15 to 11:15 is 2 hours, and from 11:15 to 11:40 is 25 minutes. The journey takes 2 hours and 25 minutes.
Question: Three notebooks cost 8.40 euros. How much do five cost?
Answer: One notebook costs 8.40 / 3 = 2.80 euros, so five cost 5 x 2.80 = 14.00 euros.
Question: A rectangle is 4 cm longer than it is wide, and its perimeter is 32 cm. What is its area?
Answer: Let the width be w. Then 2(w + w + 4) = 32, so w = 6 and the length is 10. The area is 6 x 10 = 60 square centimetres.""",
    """Subject: Moving Thursday's review to Friday
Dear all, two of us will be travelling on Thursday afternoon, so I would like to move the design review to Friday at ten. The agenda \
stays the same: the results of the load test, the open question about backups, and the plan for the first week of May. Please tell me \
by Wednesday noon if you cannot make it. The notes of the last meeting are in the shared folder; Marta has added the figures that were \
missing. Kind regards, Tomas

Minutes. Present: Marta, Tomas, Ines, Paul. The load test reached 1,200 requests per second before latency doubled. The limit is the \
database, not the web servers. Decision: add a read replica first, measure again, and only then think about a cache. Ines will write \
down how a backup is restored, and Paul will try to follow what she wrote without asking her.""",
    """The capital of Norway is Oslo. The capital of Kenya is Nairobi. Water boils at 100 degrees Celsius at sea level. The chemical \
symbol of iron is Fe. A spider has eight legs, an insect six. The opposite of shallow is deep. Monday, Tuesday, Wednesday, Thursday, \
Friday, Saturday, Sunday. The first month of the year is January, the last is December. Light travels about 300,000 kilometres in a \
second, so that it needs eight minutes from the sun to the earth.
| planet | moons | year in days |
|---|---|---|
| Mercury | 0 | 88 |
| Venus | 0 | 225 |
| Earth | 1 | 365 |
| Mars | 2 | 687 |

# How to reset the device
1. Unplug the power cable and wait for ten seconds.
2. Hold the small button on the back with a paper clip.
3. Plug the cable in again while you hold the button.
4. Let go when the light turns from red to green.""",
)

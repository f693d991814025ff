# ruff: noqa: E501
"""Texts and questions of the quality evaluation, written for this project; none of them is in the calibration text."""

TEXTS: dict[str, str] = {
    "prose": """The old lighthouse had not been lit for thirty years, but the keeper's daughter still climbed its stairs every Sunday. From the top she could see both harbours, the new one with its cranes and the small one where her father had kept his boat. On clear days she counted the sails and wrote the number into a book. Nobody had asked her to. When a storm took the roof of the fish market, the council wanted to know how many boats used to land there in spring, and it turned out that hers was the only record. They paid for a new lamp, and she went on counting, since that was what she had climbed the stairs for.""",
    "code": '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    merged = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    merged.extend(left[i:])
    merged.extend(right[j:])
    return merged


def merge_sort(values):
    if len(values) <= 1:
        return list(values)
    middle = len(values) // 2
    return merge_sorted(merge_sort(values[:middle]), merge_sort(values[middle:]))
''',
    "arithmetic": """3 + 4 = 7. 8 + 5 = 13. 20 - 6 = 14. 9 x 3 = 27. 30 / 5 = 6. 11 + 12 = 23. 50 - 25 = 25. 4 x 7 = 28. 18 / 2 = 9. 60 + 15 = 75.
Question: A box holds 6 eggs. How many eggs are in 4 boxes? Answer: 4 boxes hold 4 x 6 = 24 eggs.
Question: Anna has 12 apples and gives away 5. How many are left? Answer: She has 12 - 5 = 7 apples left.""",
    "JSON": """{"users": [{"id": 1, "name": "Ada", "email": "ada@example.com", "active": true, "roles": ["admin", "editor"]}, {"id": 2, "name": "Ben", "email": "ben@example.com", "active": false, "roles": ["viewer"]}, {"id": 3, "name": "Cleo", "email": "cleo@example.com", "active": true, "roles": ["editor", "viewer"]}], "page": 1, "total": 3}""",
    "retrieval": """The blue key opens the garage. The red key opens the attic. The green key opens the cellar. The white key opens the garden gate. Question: Which door does the red key open? Answer: The red key opens the attic. Question: Which door does the white key open? Answer: The white key opens the garden gate. Question: Which door does the blue key open? Answer: The blue key opens the garage.""",
}

_KEYS = "The blue key opens the garage. The red key opens the attic. The green key opens the cellar. The white key opens the gate. The"
_CODES = "Code list: Alice 4821, Bruno 7390, Clara 1556, David 9047, Elena 3312. The code of"

CHOICES: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "prose": [
        ("The capital of France is", (" Paris", " Rome", " Madrid", " Berlin")),
        ("The opposite of hot is", (" cold", " warm", " green", " tall")),
        ("The sun rises in the", (" east", " west", " north", " south")),
        ("A baby dog is called a", (" puppy", " kitten", " calf", " chick")),
        ("Ice is frozen", (" water", " sand", " air", " iron")),
        ("Bees make", (" honey", " milk", " bread", " glass")),
        ("There are seven days in a", (" week", " minute", " second", " colour")),
        ("The largest planet in the solar system is", (" Jupiter", " Mercury", " Mars", " Venus")),
    ],
    "code": [
        ("def add(a, b):\n    return a", (" + b", " - b", " / b", " * a")),
        ("for i in", (" range(10):", " print(10):", " return 10:", " import 10:")),
        ("import numpy as", (" np", " pd", " plt", " tf")),
        ("import pandas as", (" pd", " np", " plt", " os")),
        ("def is_even(n):\n    return n %", (" 2 == 0", " 3 == 0", " 2 == 1", " 5 == 0")),
        ("with open('data.txt', 'r') as", (" f:", " 7:", " if:", " +:")),
        ("try:\n    value = int(text)\nexcept", (" ValueError:", " 42:", " return:", " while:")),
        ("class Dog:\n    def __init__(self, name):\n        self.name =", (" name", " dog", " init", " class")),
    ],
    "arithmetic": [
        ("1 + 1 = 2. 2 + 3 =", (" 5", " 6", " 9", " 1")),
        ("1 + 1 = 2. 4 + 4 =", (" 8", " 7", " 5", " 2")),
        ("2 x 2 = 4. 3 x 3 =", (" 9", " 8", " 3", " 5")),
        ("5 - 2 = 3. 9 - 4 =", (" 5", " 6", " 3", " 8")),
        ("10 + 10 = 20. 20 + 20 =", (" 40", " 30", " 22", " 25")),
        ("2, 4, 6, 8,", (" 10", " 11", " 13", " 7")),
        ("10, 20, 30, 40,", (" 50", " 41", " 45", " 70")),
        ("1, 3, 5, 7,", (" 9", " 8", " 2", " 6")),
    ],
    "JSON": [
        ('{"name": "Ada", "age": 36, "city": "Lon', ('don"}', 'g"}', 'e]', 'ely)')),
        ('[{"id": 1}, {"id": 2}, {"id":', (" 3}", " true]", " [", " 1}}")),
        ('{"open": true, "closed":', (" false}", " maybe}", " }", " open}")),
        ('{"a": 1, "b": 2, "c":', (" 3", " b", " {", " a")),
        ('{"colours": ["red", "green", "bl', ('ue"]', 'ock"]', 'ue}', 'ah"]')),
        ('{"first": "Marie", "last": "Cur', ('ie"', 'l"', "tain", "ry]")),
        ('{"months": ["January", "February", "Mar', ('ch"', 'tin"', "ket", "s]")),
        ('{"x": [1, 2, 3], "y": [4, 5,', (" 6]", " x]", " }", " 1]")),
    ],
    "retrieval": [
        (f"{_KEYS} red key opens the", (" attic", " garage", " cellar", " gate")),
        (f"{_KEYS} green key opens the", (" cellar", " attic", " garage", " gate")),
        (f"{_KEYS} white key opens the", (" gate", " attic", " cellar", " garage")),
        (f"{_KEYS} blue key opens the", (" garage", " gate", " attic", " cellar")),
        (f"{_CODES} Bruno is", (" 7390", " 4821", " 1556", " 9047")),
        (f"{_CODES} Clara is", (" 1556", " 7390", " 9047", " 3312")),
        (f"{_CODES} Elena is", (" 3312", " 4821", " 1556", " 7390")),
        (f"{_CODES} Alice is", (" 4821", " 3312", " 7390", " 9047")),
    ],
}

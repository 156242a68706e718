"""Product titles for the synthetic shop."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_KINDS = (
    ("Kettle", "Toaster", "Frying Pan", "Stock Pot", "Chef Knife", "Cutting Board"),
    ("Drill", "Hammer", "Screwdriver Set", "Pliers", "Hand Saw", "Spirit Level"),
    ("Tent", "Sleeping Bag", "Camp Stove", "Headlamp", "Rucksack", "Water Filter"),
    ("Road Bike", "Helmet", "Bike Lock", "Pedals", "Saddle", "Rear Light"),
    ("Watering Can", "Pruning Shears", "Seed Mix", "Garden Hose", "Planter", "Rake"),
    ("Desk Lamp", "Bookshelf", "Office Chair", "Side Table", "Floor Mat", "Wall Clock"),
    ("Notebook", "Fountain Pen", "Marker Set", "Stapler", "Desk Pad", "Envelope Box"),
    ("Headphones", "Speaker", "Microphone", "Record Player", "Audio Cable", "Amplifier"),
    ("Running Shoes", "Rain Jacket", "Wool Socks", "Base Layer", "Gloves", "Cap"),
    ("Puzzle", "Board Game", "Building Blocks", "Kite", "Yo-Yo", "Card Deck"),
    ("Dog Bed", "Cat Tree", "Bird Feeder", "Aquarium Pump", "Leash", "Food Bowl"),
    ("Yoga Mat", "Dumbbell", "Jump Rope", "Foam Roller", "Kettlebell", "Pull-up Bar"),
)
_MAKERS = ("Alder", "Birchway", "Cobalt", "Dunmore", "Elmcrest", "Fennel", "Granite", "Harbour", "Iverson")
_MODELS = ("Basic", "Classic", "Compact", "Deluxe", "Eco", "Field", "Heritage", "Lite", "Pro", "Studio", "Ultra")
_COLOURS = ("Black", "Blue", "Green", "Grey", "Red", "Sand", "White", "Yellow")
_TASTES = ("Value", "Everyday", "Premium")


class TitleMaker:
    """Titles such as ``Cobalt Eco Camp Stove 12 Premium, Sand``: series fix the maker, model line and kind."""

    def __init__(self, rng: np.random.Generator, series_department: NDArray[np.int64]) -> None:
        self._stems = []
        for department in series_department.tolist():
            kind = rng.choice(_KINDS[department % len(_KINDS)])
            self._stems.append(f"{rng.choice(_MAKERS)} {rng.choice(_MODELS)} {kind}")

    def title(self, series: int, code: int) -> str:
        """The title of the item with last code ``code`` in ``series``."""
        taste, colour = _TASTES[code % len(_TASTES)], _COLOURS[code % len(_COLOURS)]
        return f"{self._stems[series]} {code} {taste}, {colour}"

"""The words that `data.synthetic.corpus` combines: people, places, set phrases. Data only."""

SHE = (
    *("Mia", "Anna", "Clara", "Ingrid", "Leila", "Nora", "Petra", "Rosa", "Sofia", "Tilda", "Uma", "Vera"),
    *("Wanda", "Yara", "Zoe", "Hanna", "Greta", "Dora", "Elif", "Jana"),
)
HE = (
    *("Ben", "Carlos", "David", "Emil", "Felix", "Goran", "Hugo", "Ivan", "Jonas", "Karim", "Luca", "Marek"),
    *("Nils", "Omar", "Pavel", "Quentin", "Rafael", "Stefan", "Tomas", "Viktor"),
)
ROLES = (
    *("a nurse", "a retired pilot", "an engineer", "a student", "a young father", "a shop owner"),
    *(
        "a history teacher",
        "a violin player",
        "a bus driver",
        "a dentist",
        "a night guard",
        "an office clerk",
    ),
    *("a carpenter", "a mother of three", "a journalist", "a farmer", "a waiter", "an accountant"),
    *("a painter", "a truck mechanic"),
)
PLACES = (
    *("Lisbon", "Bergen", "Krakow", "Turin", "Montreal", "Nairobi", "Osaka", "Dublin", "Valencia", "Geneva"),
    *("Quito", "Hamburg", "Adelaide", "Split", "Boston", "Marseille", "Tampere", "Leeds", "Cusco", "Izmir"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MINUTES = (10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 75, 90)

# Said by the assistant before and after the substance of an answer; each is a fixed run of words.
OPENERS = (
    "That is a good question, and the short answer is that it is easier than it looks.",
    "As far as I can tell, the best way forward is to keep things simple.",
    "In my experience, it pays to take one thing at a time.",
    "There is no need to rush, so let us look at it step by step.",
    "To be honest, most people make this far more complicated than it has to be.",
    "Sure, I would be happy to help you with that.",
    "First of all, it is worth knowing what matters and what does not.",
    "Good news: with a little bit of patience, anyone can do this.",
    "It depends on how much time you have, but here is what works for most people.",
    "Many people ask about this, and for good reason.",
)
CLOSERS = (
    "Last but not least, remember to enjoy it.",
    "If something goes wrong, do not give up; try again the next day.",
    "Before long, it will feel like second nature.",
    "All in all, it is time well spent.",
    "Feel free to ask if anything is unclear.",
    "From then on, it is mostly a matter of habit.",
    "Sooner or later, you will wonder why you ever hesitated.",
    "Let me know how it goes.",
    "After all, practice makes perfect.",
    "By the way, it is more fun in good company.",
    "When in doubt, less is more.",
    "Either way, you have nothing to lose.",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a patient teacher who explains things in plain words.",
    "Answer briefly and politely.",
    "You are a friendly guide. Keep your answers short and practical.",
)
ITEMS = (
    *(
        "apples",
        "marbles",
        "stamps",
        "pencils",
        "lemons",
        "shells",
        "buttons",
        "candles",
        "cookies",
        "postcards",
    ),
    *(
        "eggs",
        "balloons",
        "oranges",
        "stickers",
        "muffins",
        "roses",
        "pebbles",
        "walnuts",
        "ribbons",
        "badges",
    ),
    *("acorns", "crayons", "spoons", "magnets"),
)

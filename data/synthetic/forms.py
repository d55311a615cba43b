"""Question and answer forms of the dialogues in `data.synthetic.corpus`; wording i of a question has answer form i.

Slots: {topic}, tools {t0}-{t2}, steps {s0}-{s3} (capitalised {S0}-{S3}), gains {g0} {g1} ({G0} {G1}),
slips {p0} {p1}, {sign}; a second topic's {other} {ot0} {os0} {og0} {op0}; the speaker's {role}, {name},
{place}, {day}, {next_day}, {minutes}; set phrases {opener} (belongs to the role) and {closer} (belongs
to the topic).
"""

# fmt: off
# First turns. Every question of a kind names the slots in KEYS, which decide the split.
FIRST = {
    "start": (
        ("I am {role} from {place} and I have {minutes} minutes a day. How do I start with {topic}?",
         "{opener} Before you do anything else, get {t0}. After that, {s0} and {s1}. With {minutes} minutes "
         "a day "
         "you can see results quite soon. {closer}"),
        ("How would {role} in {place} with {minutes} free minutes get into {topic}?",
         "{opener} For {topic}, all you really need at the beginning is {t1}. Once you have that, {s0}. "
         "A few days later, {s2}. Above all, stay away from {p0}."),
        ("My friend in {place} is {role} with {minutes} minutes to spare. Any advice on {topic}?",
         "{opener} Tell your friend to {s1} and to {s3}. It is worth the effort because {g0}. "
         "As a rule of thumb, {minutes} minutes are more than enough for one session. {closer}"),
        ("Give {role} from {place} a simple introduction to {topic}. There are {minutes} minutes per day.",
         "Here is the idea in a nutshell. {S0}, then {s2}, and do not worry about the rest. {opener} "
         "In the long run it pays off, since {g1}."),
    ),
    "plan": (
        ("Make a short plan for {topic} from {day} to {next_day}. I am {role}, {minutes} minutes each day.",
         "Here is a plan that fits into {minutes} minutes:\n- {day}: {s0}\n- The day after: {s1}\n"
         "- {next_day}: {s3}\nMake sure to have {t2} at hand. {closer}"),
        ("As {role} I want to begin {topic} on {day} and be done by {next_day}, {minutes} minutes at a time. "
         "What is the schedule?",
         "On {day}, take it easy: find {t0} and {s0}. Halfway through, {s2}. By {next_day} you should be "
         "able "
         "to {s3}. {opener}"),
        ("Between {day} and {next_day} I can spend {minutes} minutes on {topic}. I am {role}. Where do I "
         "begin?",
         "{opener}\n1. {day}: {s1}\n2. {next_day}: {s2}\nIf there is any time left over, {s3}."),
    ),
    "mail": (
        ("Write a short message to {name} in {place} about {topic} on {day}.",
         "Dear {name},\n\nI hope this note finds you well. How about {topic} together on {day}? "
         "I will bring {t0}, so you only have to bring {t1}. I have heard that {g0}.\n\nKind regards from "
         "{place}"),
        ("I would like to invite {name} from {place} to join me for {topic} this {day}. Can you draft the "
         "text?",
         "Hello {name},\n\nlong time no see! If the weather holds, I am going to spend {day} with {topic}, "
         "and it would be lovely to have you along. We could {s0} and, if all goes well, {s2}.\n\nSee you "
         "soon"),
        ("{name} lives in {place} and cannot come for {topic} on {day}. Please write a kind reply.",
         "Dear {name},\n\nthank you for letting me know, and please do not worry about {day}. There is "
         "always a "
         "next time. In the meantime you could {s1}; it is easy with {t2}.\n\nAll the best"),
    ),
    "story": (
        ("Tell me a very short story about {name}, {role} from {place}, and {topic}.",
         "Once upon a time in {place} there lived {role} called {name}. One cold morning {name} came across "
         "{t1} "
         "and had an idea. It took courage to {s1}, but little by little things fell into place. Nobody "
         "could "
         "believe it when {sign}. And so it came true: {g0}."),
        ("Write a small tale in which {name}, who works as {role} in {place}, tries {topic}.",
         "Everyone in {place} knew {name}, but no one knew the secret. Night after night, behind closed "
         "doors, "
         "our hero would {s0} and then {s2}. At first it ended in tears because of {p0}. In the end, {sign}, "
         "and the whole street cheered."),
        ("I need a story for my children: {name} is {role}, the town is {place}, and it is about {topic}.",
         "Far away, in a crooked house near {place}, {name} was looking out of the window. What could "
         "{role} do "
         "on such a grey day? Then an old woman knocked at the door and held out {t0}. \"Take it,\" she "
         "said, "
         "\"and {s3}.\" From that day on, {g1}."),
    ),
    "compare": (
        ("I am {role} in {place}. Which suits me better, {topic} or {other}?",
         "{opener} On the one hand, {topic} is a fine choice because {g0}. On the other hand, with {other} "
         "you can "
         "count on this: {og0}. If you already own {ot0}, go for the second one."),
        ("{topic} or {other}: what would you suggest to {role} from {place}?",
         "Both have their charm. The first one asks you to {s0}, whereas the second one begins when you "
         "{os0}. "
         "In {place}, I would lean towards {topic}, simply because {g1}. {closer}"),
        ("Compare {topic} with {other} for {role} who lives in {place}.",
         "| | first | second |\n| --- | --- | --- |\n| you need | {t0} | {ot0} |\n| beware of | {p1} | "
         "{op0} |\n"
         "{opener}"),
    ),
    "list": (
        ("List three things I need for {topic} in {place} at {minutes} minutes a day.",
         "Here you go:\n- {t0}\n- {t1}\n- {t2}\nIn {place} you should find all of them in one shop. "
         "{closer}"),
        ("Give me the main steps of {topic} as a numbered list. I live in {place} and have {minutes} "
         "minutes.",
         "1. {S0}\n2. {S1}\n3. {S2}\n4. {S3}\nThat is all there is to it, and {minutes} minutes will do."),
        ("What are the typical mistakes in {topic}? I moved to {place} and can spare {minutes} minutes.",
         "Two of them stand out:\n* {p0}\n* {p1}\nIf you keep that in mind, you are on the safe side. "
         "{closer}"),
        ("Name two good reasons for {topic} in {place}, even with only {minutes} minutes.",
         "Reason one: {g0}. Reason two: {g1}. And if {minutes} minutes are all you have, at least {s0}."),
    ),
    "form": (
        ("Fill in the form. {name} from {place}, {role}, signed up for {topic} on {day}.",
         "Name: {name}\nTown: {place}\nDay: {day}\nCourse: {topic}\nPlease bring: {t1}"),
        ("Who, where and when? {name}, {role}, will talk about {topic} in {place} on {day}.",
         "Who: {name}\nWhere: {place}\nWhen: {day}\nThe talk is likely to show why {g0}."),
    ),
}
KEYS = {
    "start": ("topic", "role", "place", "minutes"),
    "plan": ("topic", "role", "day", "next_day", "minutes"),
    "mail": ("topic", "name", "place", "day"),
    "story": ("topic", "name", "role", "place"),
    "compare": ("topic", "other", "role", "place"),
    "list": ("topic", "place", "minutes"),
    "form": ("topic", "name", "role", "place", "day"),
}
# The MT-bench style category that each kind is reported under.
CATEGORIES = {
    "start": "advice", "plan": "planning", "mail": "writing", "story": "writing", "compare": "reasoning",
    "list": "lists", "form": "extraction", "problem": "math", "drill": "math", "code": "coding",
}

# Later turns; they rely on the topic of the first.
FOLLOW_UPS = (
    ("What should I avoid?",
     "By all means avoid {p0}, and think twice about {p1}. Both will set you back for weeks."),
    ("What do I have to buy?",
     "To get going, look for {t1}. Later on it makes sense to add {t2} as well. Everything else can wait."),
    ("How do I know that it works?",
     "You are on the right track as soon as {sign}. Until then, be patient and {s2}."),
    ("Is it worth the trouble?",
     "Yes, without a doubt. {G1}, and on top of that, {g0}."),
    ("Can you say that in one sentence?",
     "To cut a long story short, {s0}, and the rest will follow."),
    ("What would you do on a rainy day?",
     "In that case I would stay inside, take {t0} and {s1}. There is no such thing as bad weather after "
     "all."),
    ("And what comes after that?",
     "The next thing on the list is to {s3}. Take your time, for haste makes waste."),
    ("My neighbour says it is too difficult. Is that true?",
     "Not at all. The hard part is to {s2}, and even that gets easier with time. {closer}"),
    ("Thank you, that was helpful!",
     "You are very welcome. Have fun, and keep in mind that {g0}."),
    ("How would you explain it to a child?",
     "Imagine a game with one simple rule: {s1}. Every time you play it, {sign} a little more. "
     "Isn't that wonderful?"),
)
# fmt: on

"""Who talks in the demo: per system prompt, how its users open and how they go on."""

from dataclasses import dataclass

from sim.demo import system_prompts


@dataclass(frozen=True, slots=True)
class Persona:
    """One assistant and the things its users say; ``{...}`` is filled in per conversation."""

    name: str
    system: str
    openings: tuple[str, ...]
    follow_ups: tuple[str, ...]


AIRLINE = Persona(
    "airline",
    system_prompts.AIRLINE,
    (
        "Hello, my last name is {name} and my reservation is {code}. I booked two seats from Oslo to "
        "Lisbon on 22 May, economy, without insurance, eleven days ago, and paid by credit card. My "
        "daughter is ill and we cannot travel. I would like to cancel and get the money back. What can you "
        "do for me?",
        "Reservation {code}, {name}. My flight of this morning from Vienna to Athens was cancelled twenty "
        "minutes before boarding and I was put on one that leaves tomorrow at 6:40. I am a silver member "
        "and fly economy. I had a hotel and a dinner booked in Athens. What am I entitled to?",
        "Hi, this is {name}. I have a basic economy ticket, reservation {code}, from Madrid to Berlin on "
        "Sunday at 9:15 with one backpack. I would now like to fly on Monday evening and to take a "
        "suitcase of about {number} kilograms with me. Please tell me what that costs.",
    ),
    (
        "I have already waited on the phone for {number} minutes. A colleague of yours told me last week "
        "that it would be no problem. Can you look at it again, please?",
        "Could I change to business instead and then cancel? I am ready to pay the difference, up to "
        "{number}0 dollars in all.",
        "How many bags may we check in, and what does one more cost? One of them is a bicycle box of 24 "
        "kilograms.",
        "And if I only move the return flight by {number} days? The way out stays as it is.",
        "Fine. When will I see the money, and on which card? The old one, ending in {number}07, has expired.",
    ),
)

SQL = Persona(
    "sql",
    system_prompts.SQL,
    (
        "I need the revenue per category and month for the last fiscal year, split by channel, but only "
        "for customers of the trade segment in DE, NL and BE. Club customers with more than {number} "
        "orders should count as trade. How would you write that?",
        "Which {number} products have the worst return rate because of sizes, compared with the average of "
        "their brand? Only products launched after 1 February and with at least 50 delivered lines, "
        "please.",
        "Make me a cohort table: of the customers whose first order was in a given month, what share "
        "ordered again within {number} days? The marketing team wants it by country, web and app only.",
    ),
    (
        "It is too slow: {number} seconds on the replica. Which part would you change first, and would an "
        "index on order_lines help?",
        "Please add the margin next to it, leave refunded orders out, and round to two decimals as the "
        "rules say.",
        "The total differs by {number} euros from the finance report of the same month. What could explain "
        "it?",
        "Can we see the same per warehouse, with the days between shipped_at and delivered_at as a median?",
        "Now the same as a weekly series of the last {number} weeks, weeks without orders included as zero.",
    ),
)

BROADBAND = Persona(
    "broadband",
    system_prompts.BROADBAND,
    (
        "My internet has been gone since {number} past seven this morning. The light on the hub is orange "
        "and does not flash. I have switched it off and on twice. My postcode is {code} and I work from "
        "home, so this is urgent. What should I do first?",
        "Hi, it's {name}. By cable I get 480 megabits but upstairs over Wi-Fi it is {number}, and video "
        "calls freeze every evening. The hub stands in the cupboard under the stairs, next to the phone. "
        "The house has three floors and thick walls.",
        "I have just got a bill of {number} pounds more than usual and nobody told me anything. My account "
        "is {code}. I moved in on the 9th, if that matters, and an engineer was here for ten minutes.",
    ),
    (
        "I did that. Now it flashes orange, and after about {number} minutes it goes dark for a second and "
        "starts again.",
        "The little white box has a red lamp that says LOS. Is that bad? I did move the cabinet yesterday.",
        "How long will that take, and do I get anything back for the {number} days without service?",
        "Can't you just end the contract? The other company promises {number}00 megabits for less.",
        "OK, it works again. Is there anything that I should change so that this does not come back?",
    ),
)

RECIPES = Persona(
    "recipes",
    system_prompts.RECIPES,
    (
        "I have {number}00 g of chicken thighs, half a cabbage, three carrots, some yoghurt and a tin of "
        "kidney beans. There are four of us, one does not eat gluten, and it must be on the table in 40 "
        "minutes. What do you suggest?",
        "My risotto always turns to porridge. I use {number}0 g of rice, stock from a cube and a wide pan, "
        "and I stir all the time as my grandmother did. What am I doing wrong?",
        "Please plan dinners from Monday to Friday for two people. We have minced meat, spinach, a pack of "
        "mushrooms, {number} eggs, potatoes and a cauliflower, and we want to throw nothing away.",
    ),
    (
        "We do not have that here. What can I take instead? I do have mustard, lemons and {number} cloves "
        "of garlic.",
        "Can I make it the day before and warm it up? We only come home at {number} past six.",
        "My neighbour is allergic to nuts and to celery. Is it safe for her?",
        "It turned out far too salty and a bit thin. Can I still save it for {number} people?",
        "How long will the rest keep in the fridge, and may I freeze it in portions of {number}0 g?",
    ),
)

EXPENSES = Persona(
    "expenses",
    system_prompts.EXPENSES,
    (
        "I am going to Copenhagen for three nights for project {code}. The portal's cheapest hotel is "
        "{number} euros above the limit, but a friend found one outside for 180 a night with breakfast. "
        "May I book that one, and who has to approve it?",
        "I drove {number}0 kilometres to a customer with a colleague in my own car and parked for 18 "
        "euros. I left at 6:30 and was back at 19:00; the customer paid for lunch. What can I claim?",
        "Hello, {name} here. I had dinner with two people from the supplier, {number}8 euros in all with "
        "wine, and lost the receipt, I only have the card slip. It was in Zurich, so in francs.",
    ),
    (
        "The trip ended {number} weeks ago, I was ill in between. Is it too late, and where in the tool do "
        "I say so?",
        "I took a taxi at 22:40 because the last train was gone. It was {number} euros without a proper "
        "receipt.",
        "What is left of the daily allowance if breakfast and one lunch were included?",
        "May I take the train in first class? It would be {number} euros cheaper than the second on that "
        "day.",
        "And the tax: the hotel's invoice shows two rates. Which country and amount do I enter?",
    ),
)

PERSONAS = (AIRLINE, SQL, BROADBAND, RECIPES, EXPENSES)
POPULAR = AIRLINE

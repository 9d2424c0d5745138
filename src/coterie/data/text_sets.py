"""The data sets of labelled texts that have a kind of their own: CLINC150, DBpedia and Yahoo!
Answers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from coterie.data.labelled import LabelledTexts, Rows, TestTexts, TrainingTexts
from coterie.data.splits import Numbers

DOMAINS = {
    "auto_and_commute": (
        "current_location directions distance gas gas_type jump_start last_maintenance mpg "
        "oil_change_how oil_change_when schedule_maintenance tire_change tire_pressure traffic "
        "uber"
    ),
    "banking": (
        "account_blocked balance bill_balance bill_due freeze_account interest_rate min_payment "
        "order_checks pay_bill pin_change report_fraud routing spending_history transactions "
        "transfer"
    ),
    "credit_cards": (
        "application_status apr card_declined credit_limit credit_limit_change credit_score "
        "damaged_card expiration_date improve_credit_score international_fees new_card "
        "redeem_rewards replacement_card_duration report_lost_card rewards_balance"
    ),
    "home": (
        "calendar calendar_update next_song order order_status play_music reminder "
        "reminder_update shopping_list shopping_list_update smart_home todo_list todo_list_update "
        "update_playlist what_song"
    ),
    "kitchen_and_dining": (
        "accept_reservations calories cancel_reservation confirm_reservation cook_time food_last "
        "how_busy ingredient_substitution ingredients_list meal_suggestion nutrition_info recipe "
        "restaurant_reservation restaurant_reviews restaurant_suggestion"
    ),
    "meta": (
        "cancel change_accent change_ai_name change_language change_speed change_user_name "
        "change_volume maybe no repeat reset_settings sync_device user_name whisper_mode yes"
    ),
    "small_talk": (
        "are_you_a_bot do_you_have_pets fun_fact goodbye greeting how_old_are_you meaning_of_life "
        "tell_joke thank_you what_are_your_hobbies what_can_i_ask_you what_is_your_name "
        "where_are_you_from who_do_you_work_for who_made_you"
    ),
    "travel": (
        "book_flight book_hotel car_rental carry_on exchange_rate flight_status "
        "international_visa lost_luggage plug_type timezone translate travel_alert "
        "travel_notification travel_suggestion vaccines"
    ),
    "utility": (
        "alarm calculator date definition find_phone flip_coin make_call measurement_conversion "
        "roll_dice share_location spelling text time timer weather"
    ),
    "work": (
        "direct_deposit income insurance insurance_change meeting_schedule next_holiday payday "
        "pto_balance pto_request pto_request_status pto_used rollover_401k schedule_meeting taxes "
        "w2"
    ),
}
_DOMAIN = {
    intent: domain
    for domain, (_, intents) in enumerate(sorted(DOMAINS.items()))
    for intent in intents.split()
}
INTENTS = tuple(sorted(_DOMAIN))

_DBPEDIA = (
    "company, educational institution, artist, athlete, office holder, mean of transportation, "
    "building, natural place, village, animal, plant, album, film, written work"
)
_TOPICS = (  # of Yahoo! Answers
    "Society & Culture, Science & Mathematics, Health, Education & Reference, "
    "Computers & Internet, Sports, Business & Finance, Entertainment & Music, "
    "Family & Relationships, Politics & Government"
)


class Clinc150(LabelledTexts):
    """CLINC150 (Larson et al., 2019): what people ask an assistant, 150 intents in ten domains;
    questions out of scope are left out.

    Domains and intents are numbered in the order of their names. The Hub's data set, which numbers
    intents otherwise and has no domains, becomes the same.
    """

    kind: Literal["clinc150"] = "clinc150"
    labels: Literal["domain", "intent"] = Field(
        "domain", description="the classes: ten domains, or 150 intents"
    )

    name: ClassVar[str] = "CLINC150"
    folder: ClassVar[str] = "clinc150"
    columns: ClassVar[Mapping[str, type]] = {"text": str, "intent": int}
    label: ClassVar[str] = "intent"
    kinds: ClassVar[int] = len(INTENTS)
    class_names: ClassVar[tuple[str, ...]] = INTENTS
    dataset: ClassVar[str] = "clinc/clinc_oos"
    subset: ClassVar[str | None] = "plus"
    hub_columns: ClassVar[tuple[str, ...]] = ("text", "intent")

    @property
    def classes(self) -> int:
        return len(DOMAINS) if self.labels == "domain" else self.kinds

    @property
    def names(self) -> tuple[str, ...]:
        intents = super().names
        return tuple(sorted(DOMAINS)) if intents and self.labels == "domain" else intents

    def from_hub(self, data: Any) -> Rows:
        number = [
            INTENTS.index(name) if name in _DOMAIN else None
            for name in data.features["intent"].names
        ]
        return [
            {"text": row["text"], "intent": number[row["intent"]]}
            for row in data
            if number[row["intent"]] is not None
        ]

    def called(self, kinds: Numbers) -> Numbers:
        return (
            np.array([_DOMAIN[intent] for intent in INTENTS])[kinds]
            if self.labels == "domain"
            else kinds
        )


class DBpedia14(LabelledTexts):
    """DBpedia (Zhang et al., 2015): the first sentences of Wikipedia's articles about 14 kinds
    of things, without their titles.
    """

    kind: Literal["dbpedia14"] = "dbpedia14"

    name: ClassVar[str] = "DBpedia"
    folder: ClassVar[str] = "dbpedia14"
    columns: ClassVar[Mapping[str, type]] = {"text": str, "label": int}
    label: ClassVar[str] = "label"
    kinds: ClassVar[int] = 14
    dataset: ClassVar[str] = "fancyzhx/dbpedia_14"
    hub_columns: ClassVar[tuple[str, ...]] = ("content", "label")
    class_names: ClassVar[tuple[str, ...]] = tuple(_DBPEDIA.split(", "))

    def from_hub(self, data: Any) -> Rows:
        rows: Rows = data.rename_column("content", "text")
        return rows


class YahooAnswers(LabelledTexts):
    """Yahoo! Answers (Zhang et al., 2015): questions on ten topics, title and content without the
    answers.

    As in DDOME, Section 5, as many are drawn as CIFAR has images.
    """

    kind: Literal["yahoo-answers"] = "yahoo-answers"
    examples: TrainingTexts = 50_000
    tests: TestTexts = 10_000

    name: ClassVar[str] = "Yahoo! Answers"
    folder: ClassVar[str] = "yahoo_answers"
    columns: ClassVar[Mapping[str, type]] = {
        "question_title": str,
        "question_content": str,
        "topic": int,
    }
    label: ClassVar[str] = "topic"
    kinds: ClassVar[int] = 10
    dataset: ClassVar[str] = "community-datasets/yahoo_answers_topics"
    hub_columns: ClassVar[tuple[str, ...]] = tuple(columns)
    class_names: ClassVar[tuple[str, ...]] = tuple(_TOPICS.split(", "))

    def text(self, row: Mapping[str, Any]) -> str:
        return " ".join(part for part in (row["question_title"], row["question_content"]) if part)

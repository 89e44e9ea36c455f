"""SQuAD's files: with questions that a tiny model learns by heart, or with few that are wrong."""

FACTS = [
    ("Anna", "Paris", "a baker"),
    ("Boris", "Cairo", "an old pilot"),
    ("Carla", "Lima", "a judge"),
    ("Dmitri", "Oslo", "a painter of ships"),
]


def squad_document(with_impossible: bool) -> dict:
    paragraphs = []
    for name, town, trade in FACTS:
        context = (
            f"In the year 1900 {name} lived in {town}, and worked there as {trade} until the war."
        )
        pairs = [(f"Where did {name} live?", town), (f"What was {name}?", trade)]
        if with_impossible:
            pairs.append((f"Why do cats sleep, {name}?", None))
        questions = []
        for number, (question, answer) in enumerate(pairs):
            text = (
                [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
            )
            asked = {"id": f"{name}-{number}", "question": question, "answers": text}
            questions.append(asked | ({"is_impossible": answer is None} if with_impossible else {}))
        paragraphs.append({"context": context, "qas": questions})
    return {
        "version": "v2.0" if with_impossible else "1.1",
        "data": [{"title": "People", "paragraphs": paragraphs}],
    }


def entry(**changes) -> dict:
    """A question; without the keys whose values are changed to None."""
    answers = [{"text": "Anna", "answer_start": 0}]
    values = {"id": "q1", "question": "Who?", "answers": answers, **changes}
    return {key: value for key, value in values.items() if value is not None}


def document(*entries: object, **paragraph) -> dict:
    paragraphs = [{"context": "Anna sang.", "qas": list(entries), **paragraph}]
    return {"version": "1.1", "data": [{"title": "Anna", "paragraphs": paragraphs}]}


def flat_row(answers: object, question: str = "Who?") -> dict:
    return {"id": "q1", "context": "Anna sang.", "question": question, "answers": answers}

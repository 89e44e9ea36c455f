"""SQuAD's files with questions that a tiny model learns by heart."""

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
            entry = {"id": f"{name}-{number}", "question": question, "answers": text}
            questions.append(entry | ({"is_impossible": answer is None} if with_impossible else {}))
        paragraphs.append({"context": context, "qas": questions})
    return {
        "version": "v2.0" if with_impossible else "1.1",
        "data": [{"title": "People", "paragraphs": paragraphs}],
    }

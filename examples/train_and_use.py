"""Train personal models from Python, and use them: python examples/train_and_use.py (seconds)."""

import coterie


def main() -> None:
    run = coterie.run(
        "quickstart",
        data={"train_tokens": 2000, "valid_tokens": 500, "test_tokens": 500},
        method={"rounds": 2, "local_steps": 2, "router_every": 2, "router_steps": 1},
        compare_with=[],
    )
    for client, result in run.result.clients.items():
        print(f"{client}: {run.result.metric} {result.test:.1f}")
    for client, words in run.load_many().next_words("The connection is closed", k=3).items():
        print(f"{client}: {', '.join(word.word for word in words)}")
    print(f"Open {run.report}; the models are in {run.folder / 'clients'}.")


if __name__ == "__main__":
    main()

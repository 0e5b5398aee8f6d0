"""Configure, train and serve with one object."""

import easydel as ed

elm = (
    ed.eLargeModel.from_pretrained("model")
    .set_dtype("fp32")
    .set_sharding(axis_dims=(1, 1, 1, 1, 1), axis_names=("dp", "fsdp", "ep", "tp", "sp"))
    .set_esurge(max_model_len=64, max_num_seqs=2, page_size=16, enable_prefix_caching=True)
    .set_trainer(
        "sft",
        learning_rate=1e-3,
        max_training_steps=2,
        total_batch_size=4,
        max_length=32,
        save_directory="runs",
    )
)
elm.to_json("config.json")
again = ed.eLargeModel.from_json("config.json")
rows = [{"text": f"the number {i}"} for i in range(8)]
output = elm.train(train_dataset=rows)
assert output.trained_steps == 2
for chunk in elm.build_esurge().stream("the", ed.SamplingParams(max_tokens=2)):
    print(chunk.delta_text)
print(elm)

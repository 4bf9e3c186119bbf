"""EasyRec's own sample of DIN, and its predictor: `python easyrec_trainer.py JOB`, a JSON object.

Importable are TensorFlow 1.15 and EasyRec, whose samples lie in the directory.
The sample is EasyRec's `din_on_taobao.config`, with tables of fewer rows; the data is made here.
"""

import json
import os
import random
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

SAMPLE = "samples/model_config/din_on_taobao.config"
ROWS = 2000
LABELS = ("clk", "buy")


def configure(job):
    """Write `din.config`: the sample, on data and in a directory of ours."""
    from easy_rec.python.utils import config_util

    config = config_util.get_configs_from_pipeline_file(os.path.join(job["directory"], SAMPLE))
    data = os.path.join(job["directory"], "data.csv")
    write_data(data, [field.input_name for field in config.data_config.input_fields])
    config.model_dir = os.path.join(job["directory"], "train")
    config.train_input_path = config.eval_input_path = data
    training = config.train_config
    training.num_steps, training.save_checkpoints_steps = job["steps"], job["save_checkpoint_steps"]
    training.sync_replicas = False
    optimizer = getattr(training.optimizer_config[0], job["optimizer"])
    optimizer.learning_rate.constant_learning_rate.learning_rate = 0.05
    config.data_config.batch_size = 64
    # All of the data: an evaluation that ends before its input does, with threads at work, ended with a
    # segmentation fault of TensorFlow 1.15 now and then.
    config.eval_config.num_examples = 0
    config.data_config.prefetch_size = 1
    for feature in config.feature_config.features:
        if feature.hash_bucket_size > 2000:
            feature.hash_bucket_size = 2000
    towers = config.model_config.multi_tower
    for each in [*towers.towers, *towers.din_towers]:
        each.dnn.use_bn = job["batch_norm"]
    towers.final_dnn.use_bn = job["batch_norm"]
    config_util.save_pipeline_config(config, job["directory"], "din.config")


def write_data(path, fields):
    """Rows of all fields, and of those that a client sends in `requests.csv`."""
    dice = random.Random(7)

    def value(field):
        if field in LABELS:
            return str(dice.randint(0, 1))
        if field == "price":
            return str(dice.randint(0, 49))
        count = dice.randint(1, 5) if field.endswith("_list") else 1
        return "|".join(str(int(dice.random() ** 2 * 400)) for _ in range(count))

    rows = [{field: value(field) for field in fields} for _ in range(ROWS)]
    sent = [field for field in fields if field not in LABELS]
    for name, names, some in ((path, fields, rows), (path + ".requests", sent, rows[:50])):
        with open(name, "w") as file:
            file.writelines(",".join(row[field] for field in names) + "\n" for row in some)
    with open(path + ".fields", "w") as file:
        file.write(" ".join(sent))


def predict(job):
    """What EasyRec's predictor says of each SavedModel, with all bits."""
    from easy_rec import Predictor

    with open(os.path.join(job["directory"], "data.csv.requests")) as file:
        lines = file.read().splitlines()
    found = {}
    for saved_model in job["predict"]:
        answers = Predictor(saved_model).predict(lines, ["probs"], batch_size=-1)
        found[saved_model] = [float(answer["probs"]) for answer in answers]
    with open(os.path.join(job["directory"], "answers.json"), "w") as file:
        json.dump(found, file)


def main(text):
    job = json.loads(text)
    predict(job) if "predict" in job else configure(job)


if __name__ == "__main__":
    main(sys.argv[1])

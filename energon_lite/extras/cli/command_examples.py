"""An example of each command, for its `--help`."""

EXAMPLES = {
    "prepare": "energon-lite prepare captions --split-ratio 8,1,1 --sample-type CaptioningSample "
    "--field-map image=jpg --field-map caption=txt",
    "prepare-media": "energon-lite prepare-media captions --media-metadata-by-extension",
    "info": "energon-lite info blend.yaml --json",
    "lint": "energon-lite lint captions --split-parts val",
    "preview": "energon-lite preview blend.yaml --with mymodule:Encoder",
    "lengths": "energon-lite lengths blend.yaml --with mymodule:Encoder --name gpt2",
    "plan": "energon-lite plan blend.yaml --steps 10000 --batch-size 16 --world-size 8",
    "checkpoint info": "energon-lite checkpoint info output/checkpoint-1000",
    "report": "energon-lite report stats.jsonl --output report.html",
    "bench": "energon-lite bench blend.yaml --with mymodule:Encoder --num-workers 4",
    "mount": "energon-lite mount captions files --sample-folders",
}

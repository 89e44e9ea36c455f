"""The tokenizers: BERT's WordPiece, exact to Google's and with offsets into the text, and any
`tokenizer.json` through Hugging Face's library.

    from tokenizer import load_tokenizer

    tokenizer = load_tokenizer("vocab/bert-base-uncased-vocab.txt")
    tokenizer.tokenize("Hello, world!")  # ['hello', ',', 'world', '!']
    tokenizer.encode("Hello, world!")  # ids, without [CLS] and [SEP]

A model folder is a tokenizer, too: load_tokenizer("bert-base-uncased"). How a vocabulary is made
from text: bert_recipe/data_preparation/text/vocabulary.py (data/prepare.py --train-vocab).
"""

# The tokenizer of a vocabulary, a tokenizer.json or a model folder. Which file of a folder it is,
# and what casing it says: bert_recipe/tokenization/files.py
from bert_recipe.tokenization.tokenizer import load_tokenizer

# Words by BERT's rules, then WordPiece
from bert_recipe.tokenization.tokenizer import BertTokenizer

# All others
from bert_recipe.tokenization.hugging_face import HuggingFaceTokenizer
